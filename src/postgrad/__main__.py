"""`python -m postgrad`."""

import sys

from postgrad.cli.main import main

sys.exit(main())
