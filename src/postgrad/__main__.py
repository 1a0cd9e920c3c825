"""`python -m postgrad`."""

import sys

from postgrad.cli import main

sys.exit(main())
