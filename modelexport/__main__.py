"""``python -m modelexport``."""

import sys

from modelexport.cli import main

if __name__ == "__main__":
    sys.exit(main())
