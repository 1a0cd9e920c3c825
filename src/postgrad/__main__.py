"""`python -m postgrad` is the `postgrad` command."""

from postgrad.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
