"""`postgrad train --dry-run`: the plan, the real thing in small, what would have failed later."""
