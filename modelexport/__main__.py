"""``python -m modelexport``."""

from modelexport.cli import run

if __name__ == "__main__":
    run()
