"""`python -m server`: run the command `penstock` from the source tree, without installing it."""

from server.cli.clean_exit import stopped_at_once


def main() -> None:
    with stopped_at_once():
        from server.cli.main import app
    app(prog_name="penstock")


if __name__ == "__main__":
    main()
