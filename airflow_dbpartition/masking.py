"""Hiding passwords in texts that people will see."""

from __future__ import annotations

import re

# Up to the last @: a password may hold one, and a slash. A URL whose colon was forgotten is masked too.
# Bounded, and begun only where a word begins: a long text without blanks must not cost the square of its length.
_URL_PASSWORD = re.compile(r"(?<![\w+.-])(\w[\w+.-]{0,60}:?//[^:/@\s]{0,200}):\S{0,2000}@")
# MySQL's "(using password: YES)" holds none.
_KEYWORD_PASSWORD = re.compile(
    r"(?i)\b(password|passwd|pwd|secret|token)(\s*[=:]\s*)(?!(?:YES|NO)\))('[^']*'|\"[^\"]*\"|[^\s,;&]+)"
)


def mask_secrets(text: str) -> str:
    """Replace passwords in URLs and in key=value pairs by ***."""
    return _KEYWORD_PASSWORD.sub(r"\1\2***", _URL_PASSWORD.sub(r"\1:***@", text))
