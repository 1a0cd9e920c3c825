"""`postgrad train --sweep`: the runs of a sweep, their results and their page."""
