"""Conversations as training data has them on disk."""

import json
from pathlib import Path
from typing import Any


def openai(*texts: Any) -> dict[str, Any]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


def sharegpt(*turns: tuple[str, str]) -> dict[str, Any]:
    """(from, value) turns."""
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def write_lines(path: Path, *records: Any) -> str:
    """JSONL of records, or of lines as they are given; returns the path."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)
