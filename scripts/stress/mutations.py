"""Ways to damage a file: each makes other bytes of the content of a file, as a function of a random generator."""

import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml

Damage = Callable[[bytes, random.Random], bytes]
Change = Callable[[dict[str, Any], random.Random], None]


def flip(content: bytes, rng: random.Random) -> bytes:
    """One to eight flipped bits."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(content: bytes, rng: random.Random) -> bytes:
    """The end is missing, or the start."""
    cut = rng.randrange(len(content))
    return content[:cut] if rng.random() < 0.8 else content[cut:]


def zero(content: bytes, rng: random.Random) -> bytes:
    """A range of zeros, as after a crash of the machine."""
    start = rng.randrange(len(content))
    length = min(rng.choice((1, 4, 16, 512, 4096)), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def append(content: bytes, rng: random.Random) -> bytes:
    """Bytes after the end: random ones, a part of the file, or the whole file again."""
    return content + rng.choice((rng.randbytes(rng.randrange(1, 200)), content[: rng.randrange(len(content))], content))


def change_length(content: bytes, rng: random.Random) -> bytes:
    """Another number in a header: a size in an archive, the shape of an array, the length of a safetensors header."""
    value = rng.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, rng.getrandbits(32)))
    if content[:2] != b"PK":
        return (
            struct.pack("<Q", rng.choice((value, 2**63, len(content), rng.randrange(2 * len(content))))) + content[8:]
        )
    shape = content.find(b"'shape': (")
    if shape >= 0 and rng.random() < 0.5:
        places = [place for place in range(shape, shape + 24) if content[place : place + 1].isdigit()]
        place = rng.choice(places)
        return content[:place] + str(rng.randrange(10)).encode() + content[place + 1 :]
    marks = {b"PK\x03\x04": (14, 18, 22, 26), b"PK\x01\x02": (16, 20, 24, 28, 42), b"PK\x05\x06": (8, 12, 16)}
    places = [
        start + offset
        for mark, offsets in marks.items()
        for start in _find_all(content, mark)
        for offset in offsets
        if start + offset + 4 <= len(content)
    ]
    place = rng.choice(places)
    return content[:place] + struct.pack("<I", value) + content[place + 4 :]


def _find_all(content: bytes, mark: bytes) -> Iterator[int]:
    start = content.find(mark)
    while start >= 0:
        yield start
        start = content.find(mark, start + 1)


def swap_members(content: bytes, rng: random.Random) -> bytes:
    """Two members of a zip archive exchange their content, with valid checksums; or two tensors their places."""
    if content[:2] != b"PK":
        return _change_header(content, rng, _swap_offsets)
    members = _members(content)
    first, second = rng.sample(range(len(members)), 2)
    (a, one), (b, two) = members[first], members[second]
    members[first], members[second] = (a, two), (b, one)
    return _archive(members)


def change_members(content: bytes, rng: random.Random) -> bytes:
    """A member is missing, doubled, renamed or empty, with valid checksums; or a tensor."""
    if content[:2] != b"PK":
        return _change_header(content, rng, _change_names)
    members = _members(content)
    index = rng.randrange(len(members))
    name, data = members[index]
    change = rng.randrange(4)
    if change == 0:
        del members[index]
    elif change == 1:
        members.insert(rng.randrange(len(members)), members[index])
    elif change == 2:
        members[index] = (name[:-1] + rng.choice("0aZ"), data)
    else:
        members[index] = (name, b"")
    return _archive(members)


def _members(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _archive(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # about names that occur twice
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def _change_header(
    content: bytes, rng: random.Random, change: Callable[[dict[str, Any], random.Random], None]
) -> bytes:
    """Change the JSON header of a safetensors file."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header, rng)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _swap_offsets(header: dict[str, Any], rng: random.Random) -> None:
    a, b = rng.sample([name for name in header if name != "__metadata__"], 2)
    parts = ["data_offsets", *(["shape"] if rng.random() < 0.7 else []), *(["dtype"] if rng.random() < 0.7 else [])]
    for part in parts:
        header[a][part], header[b][part] = header[b][part], header[a][part]


def _change_names(header: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    change = rng.randrange(5)
    if change == 0:
        del header[name]
    elif change == 1:
        header[f"{name}2"] = header[name]
    elif change == 2:
        header[f"{name}2"] = header.pop(name)
    elif change == 3:
        header[name]["dtype"] = rng.choice(("F64", "F32", "F16", "I32", "I64", "BOOL", "F8_E4M3", "X"))
    else:
        header[name]["shape"] = rng.choice(([], [1], header[name]["shape"][::-1], [2**40], [0], [-1]))


def change_values(content: bytes, rng: random.Random) -> bytes:
    """Another value or key inside of a checkpoint or of the description of an extractor, in a valid file."""
    if content[:2] != b"PK":
        return _change_header(content, rng, _change_description)
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    _change_nested(loaded, rng)
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    return buffer.getvalue()


def _change_description(header: dict[str, Any], rng: random.Random) -> None:
    about = json.loads(header["__metadata__"]["ksm_lightning"])
    about.pop("version")  # the version that wrote the file may be any
    _change_nested(about, rng)
    header["__metadata__"]["ksm_lightning"] = json.dumps(about)


def _change_nested(content: Any, rng: random.Random) -> None:
    """Change one value at a random place in nested containers, or a key."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = rng.choice(keys)
        value = content[key]
        if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
            break
        content = value
    change = rng.randrange(5)
    if change == 0:
        del content[key]
    elif change == 1 and isinstance(content, dict):
        content[f"{key}2"] = content.pop(key)
    elif change == 2 and isinstance(content, dict):
        content[f"{key}2"] = value
    elif isinstance(value, torch.Tensor) and value.numel() and change < 4:
        value.view(-1)[rng.randrange(value.numel())] = rng.choice((0.0, 1e30, float("nan"), -1.5))
    else:
        others = (None, True, 0, -1, 7, 2**70, 0.5, float("nan"), "text", [], {}, [value], {"a": value})
        content[key] = rng.choice([other for other in others if type(other) is not type(value) or other != value])


def change_option(content: bytes, rng: random.Random) -> bytes:
    """Another value for one option of a configuration, of any type."""
    options = yaml.safe_load(content)
    section = options["data"] if rng.random() < 0.6 else options
    _change_nested(section, rng)
    return yaml.safe_dump(options).encode()


def delete_lines(content: bytes, rng: random.Random) -> bytes:
    """Lines of a configuration are missing, or doubled."""
    lines = content.splitlines(keepends=True)
    for _ in range(rng.randrange(1, 5)):
        index = rng.randrange(len(lines))
        if rng.random() < 0.7 and len(lines) > 1:
            del lines[index]
        else:
            lines.insert(index, lines[index])
    return b"".join(lines)


def nest(content: bytes, rng: random.Random) -> bytes:
    """A value of a configuration is nested deeply, or has a tag that would run code if it were followed."""
    depth = rng.choice((3, 30, 300, 3000, 30_000))
    inserted = rng.choice(
        (
            "[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth, "- " * depth + "1", "[" * depth,
            "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary x", "!!timestamp 1",
            "2001-99-99", "9" * 5000, "!!set {a, b}", "? [a]", "{? {a: b} : c}", "\t", "%YAML 9.9", "'",
        )
    )  # fmt: skip
    return _replace_value(content, rng, inserted)


def add_anchors(content: bytes, rng: random.Random) -> bytes:
    """A value of a configuration holds itself, or aliases that expand to many values."""
    levels, width = rng.randrange(2, 12), rng.randrange(2, 12)
    bomb = ["x0: &x0 [lol]"]
    bomb += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * width)}]" for i in range(1, levels)]
    merged = "\n".join(bomb) + "\n"
    inserted = rng.choice((f"*x{levels - 1}", "&a [*a]", "&a {b: *a}", "*unknown", "&a", f"{{<<: *x{levels - 1}}}"))
    return merged.encode() + _replace_value(content, rng, inserted)


def _replace_value(content: bytes, rng: random.Random, inserted: str) -> bytes:
    lines = content.decode().splitlines(keepends=True)
    places = [index for index, line in enumerate(lines) if ":" in line and not line.startswith("#")]
    data = next(index for index in places if lines[index].startswith("data:"))
    index = rng.choice([place for place in places if data <= place < data + 10] if rng.random() < 0.7 else places)
    name = lines[index].partition(":")[0]
    lines[index] = f"{name}: {inserted}\n"
    return "".join(lines).encode()


BYTES: dict[str, Damage] = {
    "flipped bits": flip,
    "truncated": truncate,
    "zeroed range": zero,
    "appended bytes": append,
    "changed lengths": change_length,
    "swapped members": swap_members,
    "missing or doubled members": change_members,
}
DAMAGES: dict[str, dict[str, Damage]] = {
    "checkpoint": {**BYTES, "changed values and keys": change_values},
    "extractor": {**BYTES, "changed values and keys": change_values},
    "npz": BYTES,
    "config": {
        "flipped bits": flip,
        "truncated": truncate,
        "changed options": change_option,
        "missing or doubled lines": delete_lines,
        "deep nesting and tags": nest,
        "anchors and aliases": add_anchors,
    },
}
