"""The `dsec` command. Parses, calls and prints; what it does lives in the packages.

    main.py      entry point, the table of commands, errors to exit codes
    lazy.py      commands that are imported when they are called
    session.py   what one invocation was told: settings, output form; the node
    output.py    tables on a terminal, JSON elsewhere; progress bars
    complete.py  names for tab completion
    the others   one module per group of commands
"""
