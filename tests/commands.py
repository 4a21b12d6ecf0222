"""The command line, run in this process."""

from pipeline.cli.commands import FINE, WRONG, main


class Command:
    """Runs a command; returns its exit status, and what it printed and complained of."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse leaves by itself
            status = stop.code
        printed = self.capsys.readouterr()
        return status, printed.out, printed.err

    def done(self, *arguments):
        """What a command prints that ends well; only `prepare` has anything to say besides."""
        status, out, err = self(*arguments)
        assert status == FINE, err
        assert not err or arguments[0] == "prepare"
        return out

    def refused(self, *arguments):
        """The sentence of a command that finds a mistake."""
        status, out, err = self(*arguments)
        assert (status, out) == (WRONG, "")
        return err
