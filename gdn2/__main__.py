"""`python -m gdn2` is the command `gdn2`, also from a checkout where nothing is installed."""

from gdn2.cli import main

if __name__ == "__main__":
    main()
