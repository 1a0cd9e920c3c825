"""Makes `python -m postgrad` the command `postgrad`."""

import sys

from postgrad.cli.main import main

sys.exit(main())
