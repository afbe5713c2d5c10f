"""Turns the Jargon File, as Debian's dict-jargon carries it, into plain prose that a byte-level model can learn.

The dictionary's layout (hard line breaks, braces around cross references, pronunciations) would cost a small model
most of its capacity, so it is taken away. What stays is ASCII prose, one document an entry: ``headword: text``.
"""

from __future__ import annotations

import gzip
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

_SINGLE_QUOTES, _DOUBLE_QUOTES, _DASHES = "\u2018\u2019", "\u201c\u201d", "\u2014\u2013\u2212"
_TYPOGRAPHY = str.maketrans(_SINGLE_QUOTES + _DOUBLE_QUOTES + _DASHES, "''" + '""' + "---")

# The File is frank, and a demonstration should be fit for any room: paragraphs with coarse words are left out, and so
# are those on subjects where the nonsense of a small model could hurt (violence, drugs, sex, faith, origin, illness).
_COARSE = (
    "fuck|shit|bitch|bastard|damn|crap|piss|dick|cock|cunt|whore|slut|turd|fart|vomit|puke|barf|suck|arse|ass\\b|asshole"
    "|tit\\b|tits|boob|bullsh|prick|screw|idiot|moron|geek code"
)
_TENDER = (
    "sex|porn|rape|rap(?:ed|ing|ist)\\b|penis|vagin|breast|genital|masturb|orgasm|erotic|anal\\b|anus|rectal|naked|nude"
    "|condom|virgin|kinky|bondage|abortion|feces|faeces|urin|excre|nazi|hitler|holocaust|genocid|terroris|torture|slave"
    "|racis|nigg|fag|gay|queer|homosex|lesbian|jew|muslim|islam|christ\\b|jesus|retard|cripple|lobotom|suicid|murder"
    "|kill(?:ed|ing|er)? (?:him|her|my|your|them)self|drug|lsd|marijuana|cocaine|heroin"
)
_UNFIT = re.compile(rf"\b(?:{_COARSE}|{_TENDER})", re.IGNORECASE)
_SENSE_TAG = re.compile(r"^\[[^\]]{1,80}\]\s*")
_CROSS_REFERENCE = re.compile(r"\{\s*([^{}]*?)\s*\}")
_ONLY_A_POINTER = re.compile(r"^(See|Syn|Compare|Cf)\b.{0,120}$", re.IGNORECASE)


def read_documents(path: Path) -> list[str]:
    """Return the cleaned entries of the dictd file at `path` (a `.dict.dz`, which any gzip reader opens)."""
    with gzip.open(path, "rt", encoding="utf-8") as source:
        entries = _split_entries(source.read())
    return [document for headword, body in entries if (document := _clean_entry(headword, body))]


def _split_entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (headword, body): a headword stands alone in column 0, everything indented below it is its body."""
    headword, body = "", list[str]()
    for line in text.splitlines():
        if line and not line[0].isspace():
            yield headword, "\n".join(body)
            headword, body = line.strip(), []
        else:
            body.append(line)
    yield headword, "\n".join(body)


def _clean_entry(headword: str, body: str) -> str:
    """Return ``headword: text`` with one paragraph a line, or nothing where no readable prose is left."""
    if headword.startswith("00-database") or _UNFIT.search(headword):
        return ""
    blocks = re.split(r"\n\s*\n", body)
    paragraphs = [_clean_paragraph(block) for block in blocks if block.startswith("    ")]
    prose = "\n".join(paragraph for paragraph in paragraphs if paragraph)
    return f"{_to_ascii(headword)}: {prose}" if len(prose) > 40 else ""


def _clean_paragraph(block: str) -> str:
    """Join the lines of one paragraph and drop what is not prose (tables, drawings, bare pointers, unfit text)."""
    text = _to_ascii(" ".join(block.split()))
    text = _CROSS_REFERENCE.sub(r"\1", text)
    text = re.sub(r"^\d+\.\s*", "", text)
    text = _SENSE_TAG.sub("", text)
    text = re.sub(r"^(n|v|vi|vt|adj|adv|interj|vt\., vi)\.\s+", "", text)
    letters = sum(character.isalpha() or character == " " for character in text)
    if len(text) < 40 or letters < 0.85 * len(text) or _UNFIT.search(text) or _ONLY_A_POINTER.match(text):
        return ""
    return text


def _to_ascii(text: str) -> str:
    """Replace typography by its ASCII form and drop what has none."""
    plain = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHY))
    return plain.encode("ascii", "ignore").decode("ascii")
