"""``python -m pycomm.cli``: the ``pycomm`` program without an installed script."""

from pycomm.cli import main

if __name__ == "__main__":
    main()
