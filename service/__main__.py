"""`python -m service`: the same as `lacunar`."""

from service.cli import main

if __name__ == "__main__":
    main()
