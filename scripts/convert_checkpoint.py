"""From a clone, the same as `python -m specjax.convert_checkpoint`."""

from specjax.convert_checkpoint import main

if __name__ == "__main__":
    main()
