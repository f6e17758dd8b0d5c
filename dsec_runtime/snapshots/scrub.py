"""Rules of what a snapshot leaves out, and the account of it.

What must hold: a rule that cannot be understood is refused before anything is copied; matching
costs time in proportion to the path, whatever the pattern (names come from hostile sandboxes,
patterns from callers); everything that is left out is counted under its rule.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsec_runtime.snapshots.model import LeftOut, LeftOutTotal, Scrub
from dsecfs.errors import BadInput
from dsecfs.layers.sources.base import show

MAX_LISTED = 1000
"""Files that a report names."""
SCANNED = 1 << 20
"""Bytes at the start of a file that are looked at for secrets."""
_MAX_PARTS = 64

CACHES = (
    *("/root/.cache", "/home/*/.cache", "/var/cache/apt", "/var/lib/apt/lists", "/var/cache/dnf"),
    *("/var/cache/yum", "/var/cache/apk", "/etc/apk/cache", "/var/cache/pacman/pkg"),
    *("/root/.npm/_cacache", "/home/*/.npm/_cacache", "/root/.cargo/registry/cache"),
    *("/home/*/.cargo/registry/cache", "/root/go/pkg/mod/cache", "/home/*/go/pkg/mod/cache"),
    *("/root/.gradle/caches", "/home/*/.gradle/caches", "__pycache__", ".pytest_cache"),
    *(".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", "node_modules/.cache"),
)
HISTORY = (
    *(".bash_history", ".zsh_history", ".ash_history", ".sh_history", ".history", ".histfile"),
    *(".local/share/fish/fish_history", ".python_history", ".node_repl_history", ".irb_history"),
    *(".psql_history", ".mysql_history", ".sqlite_history", ".rediscli_history", ".dbshell"),
    *(".lesshst", ".viminfo", ".wget-hsts", ".octave_hist", ".Rhistory", ".gdb_history"),
)
TEMPORARY = ("/tmp/*", "/var/tmp/*", "/run/*")
SECRETS = (
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".git-credentials", ".pypirc", ".npmrc", ".s3cfg"),
    *(".env", ".env.*", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *(".aws/credentials", ".docker/config.json", ".kube/config", ".config/gcloud"),
    *(".config/gh/hosts.yml", ".azure", ".vault-token", ".htpasswd", "service-account*.json"),
    *(".gnupg/private-keys-v1.d", ".gnupg/secring.gpg", ".password-store", "/run/secrets"),
    *(".config/rclone/rclone.conf", ".terraform.d/credentials.tfrc.json", "*.tfstate"),
    *("/etc/shadow-", "/etc/ssh/ssh_host_*_key", "/etc/krb5.keytab"),
)
NO_SECRETS = frozenset((b".env.example", b".env.sample", b".env.template", b".env.dist"))
"""Names that look like one and are made to be shown."""

_CONTENTS = (
    ("private key", rb"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"),
    ("AWS key", rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("GitHub token", rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22})"),
    ("GitLab token", rb"\bglpat-[A-Za-z0-9_-]{20}"),
    ("Slack token", rb"\bxox[abposr]-[A-Za-z0-9-]{10}"),
    ("Google key", rb"\bAIza[0-9A-Za-z_-]{35}"),
    ("API key", rb"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32}"),
    ("Hugging Face token", rb"\bhf_[A-Za-z0-9]{34}"),
    ("npm token", rb"\bnpm_[A-Za-z0-9]{36}"),
    ("PyPI token", rb"\bpypi-AgEI[A-Za-z0-9_-]{20}"),
    ("Stripe key", rb"\b[rs]k_live_[A-Za-z0-9]{20}"),
)
_SECRET = re.compile(
    b"|".join(b"(?P<k%d>%b)" % (n, text) for n, (_, text) in enumerate(_CONTENTS))
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Why something is left out."""

    text: str
    secret: bool = False
    """The content must not get out under another name (a hard link) either."""


class _Pattern:
    """One glob: names of its path, each as a regular expression, None for `**`."""

    def __init__(self, text: str, rule: Rule) -> None:
        self.rule = rule
        anchored = text.startswith("/")
        words = [word for word in text.split("/") if word and word != "."]
        if not words or ".." in words or len(words) > _MAX_PARTS:
            raise BadInput(
                f"scrub: pattern {text[:80]!r}", hint="e.g. /var/log/*.log, node_modules, **/*.tmp"
            )
        if not anchored and words[0] != "**":
            words.insert(0, "**")
        if words[-1] == "**":
            # All that is below, and not the directory itself.
            words.append("*")
        self._parts = [None if word == "**" else _name(word) for word in words]
        last = words[-1]
        self.last = None if set(last) & set("*?[") else last.encode()
        """The name that a path must end in, if it is only one."""

    def fits(self, path: Sequence[bytes]) -> bool:
        """Whether it is exactly this path. States of a small automaton instead of backtracking."""
        states = self._closed({0})
        for name in path:
            after = set()
            for at in states:
                if at == len(self._parts):
                    continue
                part = self._parts[at]
                if part is None:
                    after.add(at)
                elif part.match(name):
                    after.add(at + 1)
            if not after:
                return False
            states = self._closed(after)
        return len(self._parts) in states

    def _closed(self, states: set[int]) -> set[int]:
        """With those that are reached because `**` may be nothing."""
        for at in tuple(states):
            while at < len(self._parts) and self._parts[at] is None:
                at += 1
                states.add(at)
        return states


def _name(word: str) -> re.Pattern[bytes]:
    # fnmatch's expressions do not backtrack without end (they are atomic), and are text; a name is
    # bytes, any of them: latin-1 takes each for a character.
    try:
        shaped = fnmatch.translate(word.encode().decode("latin-1"))
        return re.compile(shaped.encode("latin-1"))
    except re.error as e:
        raise BadInput(f"scrub: pattern {word[:80]!r}: {e}") from None


class Rules:
    """All rules of one snapshot, compiled. BadInput for one that makes no sense."""

    def __init__(self, scrub: Scrub) -> None:
        self.contents = scrub.secret_contents
        patterns: list[_Pattern] = []
        for path in scrub.paths:
            patterns.append(_Pattern(_literal(path), Rule(f"path:{path}")))
        for glob in scrub.globs:
            patterns.append(_Pattern(glob, Rule(f"glob:{glob}")))
        for wanted, name, texts in (
            (scrub.caches, "caches", CACHES),
            (scrub.history, "history", HISTORY),
            (scrub.temporary, "temporary", TEMPORARY),
            (scrub.secrets, "secrets", SECRETS),
        ):
            if wanted:
                rule = Rule(name, secret=name == "secrets")
                patterns.extend(_Pattern(text, rule) for text in texts)
        self._named: dict[bytes, list[_Pattern]] = {}
        self._others: list[_Pattern] = []
        for pattern in patterns:
            if pattern.last is None:
                self._others.append(pattern)
            else:
                self._named.setdefault(pattern.last, []).append(pattern)

    def __bool__(self) -> bool:
        return bool(self.contents or self._named or self._others)

    def match(self, path: Sequence[bytes]) -> Rule | None:
        """The rule by which a path (its names from the root) is left out. What is below a
        directory that matches is the caller's business."""
        for pattern in self._candidates(path[-1]):
            if pattern.fits(path) and not (
                pattern.rule.secret and path[-1] in NO_SECRETS
            ):
                return pattern.rule
        return None

    def _candidates(self, name: bytes) -> Iterable[_Pattern]:
        yield from self._named.get(name, ())
        yield from self._others

    def scan(self, start: bytes) -> Rule | None:
        """The rule by which a file that begins with these bytes is left out."""
        found = _SECRET.search(start)
        if found is None:
            return None
        assert found.lastgroup is not None
        return Rule(f"secret_contents: {_CONTENTS[int(found.lastgroup[1:])][0]}", secret=True)


def _literal(path: str) -> str:
    """A path as a pattern that means only itself."""
    return re.sub(r"([*?[])", r"[\1]", path)


@dataclass(slots=True)
class Report:
    """What was left out of a snapshot."""

    listed: list[LeftOut] = field(default_factory=list)
    totals: dict[str, LeftOutTotal] = field(default_factory=dict)

    def add(self, path: bytes, rule: Rule, size: int) -> None:
        if len(self.listed) < MAX_LISTED:
            self.listed.append(LeftOut(path=f"/{show(path)}", rule=rule.text, bytes=size))
        known = self.totals.get(rule.text)
        files, amount = (known.files, known.bytes) if known else (0, 0)
        self.totals[rule.text] = LeftOutTotal(files=files + 1, bytes=amount + size)
