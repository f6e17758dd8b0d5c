"""`dsec doctor`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from dsecfs.cli.output import print_json, show_rows
from dsecfs.cli.session import session


def doctor() -> None:
    """Show what this machine can do, what is missing and how to get it.

    Exit code 8 if dsec run cannot work here.
    """
    from dsecfs.doctor import examine, works
    from dsecfs.errors import Unsupported

    findings = list(examine(session().node))
    usable = works(findings)
    if session().as_json:
        print_json({"works": usable, "findings": [asdict(f) for f in findings]})
    else:
        show_rows(
            [asdict(f) for f in findings],
            {"area": "", "name": "", "state": "state", "found": "found", "hint": "what to do"},
        )
        missing = [f.hint for f in findings if f.hint.startswith("apt-get install")]
        if missing:
            packages = " ".join(hint.removeprefix("apt-get install ") for hint in missing)
            print(f"\napt-get install {packages}")
        print("\ndsec run works here" if usable else "\ndsec run cannot work here")
    if not usable:
        raise typer.Exit(Unsupported.exit_code)
