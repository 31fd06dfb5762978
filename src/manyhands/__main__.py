"""The command `manyhands`, and `python -m manyhands`. Signal handlers are set before slow imports."""

from __future__ import annotations

import sys

from manyhands.signals import end_by_sigterm

INTERRUPTED = 130


def main() -> None:
    """Run the command; Ctrl-C ends it with 130 and SIGTERM with 75 while it still imports, too."""
    try:
        end_by_sigterm()
        from manyhands.cli.commands import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("manyhands: interrupted\n")
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
