"""``python -m detaudit``."""

from detaudit.cli import main

if __name__ == "__main__":
    main()
