"""The command line: commands, parser, errors in one sentence, what the console shows."""
