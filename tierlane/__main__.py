"""`python -m tierlane` is the same as the `tierlane` command; the local stack starts its roles this way."""

from tierlane.cli import main

if __name__ == "__main__":
    main()
