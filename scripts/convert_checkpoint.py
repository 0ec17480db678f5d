"""Runs `python -m specjax.convert_checkpoint` from a clone."""

from specjax.convert_checkpoint import main

if __name__ == "__main__":
    main()
