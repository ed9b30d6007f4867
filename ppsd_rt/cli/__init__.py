"""The command line, `ppsd-run`: one module per command."""
