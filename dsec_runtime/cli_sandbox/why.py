"""`dsec sandbox why`: plain sentences about a sandbox's state, its end and its last command."""

from __future__ import annotations

from dsec_runtime.cli_sandbox.common import (
    Answer,
    SandboxArgument,
    called,
    client,
    environment_text,
    moment,
    span_text,
)
from dsec_runtime.cli_sandbox.logs import command_text
from dsec_runtime.edge.client import sandbox_path
from dsecfs.cli.output import clean, print_json, time_text
from dsecfs.cli.session import session

TAIL_LINES = 15
"""Lines of the last output that are shown."""
_TAIL_BYTES = 4000

CAUSES = {
    "asked": "somebody asked for it",
    "idle": "nothing was done in it for its idle timeout",
    "lifetime": "it reached its longest lifetime",
    "exited": "its first process ended",
    "oom": "it used up its memory",
    "lost": "it was gone when the edge looked for it",
    "reboot": "the node was restarted",
    "create-failed": "it could not be made",
    "drain": "the node is being drained",
}
FAULTS = {
    "agent": "What was run in it is to blame.",
    "environment": "Its environment is to blame.",
    "caller": "The request is to blame.",
    "platform": "The platform is to blame: this says nothing about what was run in it.",
}

OUTCOMES = {
    "timeout": "reached its time limit",
    "oom": "ran out of memory",
    "pids": "reached the limit on processes",
    "disk": "filled the disk",
    "denied": "was denied the network",
}


def why(sandbox: SandboxArgument) -> None:
    """Explain a sandbox: why it is in its state, what its last command said, limits, denials."""
    edge = client()
    found = edge.get(sandbox_path(sandbox, "why"))
    if session().as_json:
        print_json(found)
        return
    command = None
    if found["last"]:
        execs = edge.get(sandbox_path(found["sandbox"]["id"], "execs"))["execs"]
        command = next((e for e in execs if e["id"] == found["last"]["id"]), None)
    for line in explain(found, command):
        print(line)


def explain(found: Answer, command: Answer | None) -> list[str]:
    """Lines about the answer of …/why; `command` is the Exec of its last result."""
    box = found["sandbox"]
    lines = [_state(box, found["why"])]
    if fault := FAULTS.get(found["why"]["fault"]):
        lines.append(fault)
    if box["ends_at"] and box["state"] in ("running", "paused"):
        then = "paused" if box["lifetime"]["then"] == "pause" else "stopped"
        lines.append(
            f"Unless something happens in it, it will be {then} at {time_text(box['ends_at'])}."
        )
    for text in (_limits(found), _denials(found)):
        if text:
            lines.append(text)
    if found["last"]:
        lines += _last(found["last"], command)
    else:
        lines.append("No command has ended in it.")
    return lines


def _state(box: Answer, why: Answer) -> str:
    cause = CAUSES.get(why["cause"], clean(why["cause"]))
    message = clean(why["message"])
    if message and message not in cause:
        cause = f"{cause}: {message}" if cause else message
    who = f"Sandbox {clean(called(box))} ({box['id']}, {clean(environment_text(box))})"
    if box["state"] == "running":
        return f"{who} runs since {moment(box['started_at'])}."
    if box["state"] in ("stopped", "failed"):
        word = "was stopped" if box["state"] == "stopped" else "failed"
        lived = box["ended_at"] - box["created_at"]
        text = f"{who} {word} {moment(box['ended_at'])}, after {span_text(lived)}"
        return f"{text}: {cause or 'no cause is known'}."
    at = f" since {moment(box['paused_at'])}" if box["state"] == "paused" else ""
    return f"{who} is {box['state']}{at}{': ' if cause else ''}{cause}."


def _limits(found: Answer) -> str:
    hit = [e["data"].get("limit", "") for e in found["events"] if e["kind"] == "limit"]
    if found["last"] and found["last"]["limit"]:
        hit.append(found["last"]["limit"])
    names = sorted({str(name) for name in hit if name})
    return f"Limits that were hit: {', '.join(map(clean, names))}." if names else ""


def _denials(found: Answer) -> str:
    denied = [e["data"] for e in found["events"] if e["kind"] == "denied"]
    if not denied:
        return ""
    names = {str(d.get("host") or d.get("target") or d.get("address") or "") for d in denied}
    text = ", ".join(clean(name) for name in sorted(names) if name)[:400]
    return f"Denied by its network policy: {text or len(denied)}."


def _last(last: Answer, command: Answer | None) -> list[str]:
    what = f" ({clean(command_text(command))})" if command else ""
    lines = [f"Its last command{what} {_outcome(last)} after {span_text(last['duration_s'])}."]
    if last["message"]:
        lines.append(f"  {clean(last['message'])}")
    for stream, name in (("stderr", "standard error"), ("stdout", "standard output")):
        kept = last[stream]["text"][-_TAIL_BYTES:].splitlines()[-TAIL_LINES:]
        if kept:
            lines.append(f"The end of its {name}:")
            lines += [f"  | {clean(line)}" for line in kept]
    return lines


def _outcome(last: Answer) -> str:
    outcome, code = last["outcome"], last["code"]
    if outcome == "exited":
        return f"exited with {code}"
    if outcome == "signal":
        return f"was ended by signal {last['signal']}"
    if outcome == "lost":
        return "was lost: how it ended is not known"
    word = OUTCOMES.get(outcome, clean(str(outcome)))
    return word if code is None else f"{word} (exit code {code})"
