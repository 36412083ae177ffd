"""Mutants of valid files, by their format: bytes are changed, or a part of a container, which is then closed again.

A container is rebuilt with right lengths, checksums and compression, so that mutants reach the code behind them. All
randomness comes from the generator that is given: the same one makes the same mutant.
"""

import gzip
import io
import json
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from functools import lru_cache
from random import Random

import torch
from safetensors.torch import load, save

from fedobp.storage import tensor_file

NUMBERS = [
    0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**24, 2**28, 2**30, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
]  # fmt: skip
NUMBER_TEXTS = [
    "0", "-1", "-0.0", "1e999", "-1e999", "1e-999", "nan", "NaN", "inf", "-Infinity", "0x10", "1_0", "١٢", "2147483648",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1.5", "1,5", "1.",
    ".5", "3.4e39", "1e308", "007", "+3", "true", "null", "1e5", "4294967296",
]  # fmt: skip
WORDS = [
    "", " ", "\0", "\n", "\r\n", "\t", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ufffd", "é", "数据",
    '"', "'", "\\", "\\u0000", "\\ud800", "\\", "#", "=", ",", ";", ":", "|", "[", "]", "{", "}", "<script>", "{{7*7}}",
    "$(touch x)", "`x`", "%s%n", "../../../etc/passwd", "/etc/passwd", "C:\\x", "con", "__class__", "os:system", "true",
    "false", "null", "None", "NA", "nan", "2020-01-02", "10:30", "1 day", "Infinity",
]  # fmt: skip
NESTS = [
    ("[", "]"),
    ("{", "}"),
    ("(", ")"),
    ('{"a":', "}"),
    ("a.", ""),
    ("'a' . ", ""),
    ("[[a", "]]"),
    ('"', '"'),
    ("-", ""),
]


def mutant(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Return a mutant of a file, which `others` are beside: one to three changes."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = change(random, content, others)
    return content


def change(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Return a file with one change: of any bytes, or inside of what it contains."""
    if random.random() < 0.3:
        return change_bytes(random, content, others)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile's, about a name that is there twice
            return _change_inside(random, content, others)
    except Exception:  # an earlier change broke the container
        return change_bytes(random, content, others)


def _change_inside(random: Random, content: bytes, others: list[bytes]) -> bytes:
    if content[:2] == b"PK":
        return _change_zip(random, content, others)
    if content[:2] == b"\x1f\x8b":
        return gzip.compress(change(random, gzip.decompress(content), others), 1, mtime=0)
    if content[257:262] == b"ustar":
        return _change_tar(random, content, others)
    if content[:6] == b"\x93NUMPY":
        return _change_npy(random, content, others)
    if content[:6] == b"MATLAB":
        return _change_mat(random, content, others)
    if content[:5] == b"FOBP\x01":
        return _change_message(random, content, others)
    if content[:4] == b"\x89PNG":
        return _change_png(random, content, others)
    if content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content):
        return (_change_tensors if random.random() < 0.7 else _change_tensor_header)(random, content, others)
    if content[:1] in (b"{", b"[") and random.random() < 0.7:
        return _change_json(random, content)
    text = content.decode()
    return change_text(random, text).encode(errors="surrogatepass") if "\0" not in text else _no_text()


def _no_text() -> bytes:
    raise ValueError("no text")


# Bytes.


def change_bytes(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Return bytes with one change that knows no format."""
    size, at = len(content), random.randrange(len(content) + 1)
    kind = random.randrange(11)
    if kind == 0 and size:  # a bit
        at = min(at, size - 1)
        return content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
    if kind == 1:  # some bytes
        return content[:at] + random.randbytes(random.choice((1, 1, 2, 4, 16))) + content[at + 1 :]
    if kind == 2:  # cut at the end
        return content[:at]
    if kind == 3:  # cut in the middle
        return content[:at] + content[at + random.choice((1, 2, 4, 8, 64, 512)) :]
    if kind == 4:  # insert
        return content[:at] + random.choice((random.randbytes(4), bytes(8), b"\xff" * 8, bytes(512))) + content[at:]
    if kind == 5:  # a block twice
        block = content[at : at + random.choice((1, 4, 16, 128, 1024))]
        return content[:at] + block * random.choice((2, 3, 20)) + content[at + len(block) :]
    if kind == 6:  # two blocks in the other order
        a, b, c = sorted(random.randrange(size + 1) for _ in range(3))
        return content[:a] + content[b:c] + content[a:b] + content[c:]
    if kind == 7:  # the end of another file
        other = random.choice(others) if others else content
        return content[:at] + other[random.randrange(len(other) + 1) :]
    if kind == 8:
        return content + random.choice((b"\0", b"\n", bytes(600), content[:100], random.randbytes(9)))
    # An integer where a header may have one: most headers are at the beginning or the end.
    width, order = random.choice((1, 2, 4, 4, 8)), random.choice(("little", "big"))
    value = (random.choice(NUMBERS) + random.choice((0, 0, 0, -1, 1))) % 2 ** (8 * width)
    spans = ((0, min(size, 64)), (0, min(size, 512)), (max(0, size - 128), size), (0, size))
    low, high = random.choice(spans)
    at = random.randrange(low, high + 1)
    if random.random() < 0.5:
        at -= at % width
    return content[:at] + value.to_bytes(width, order) + content[at + width :]


# Text.


def change_text(random: Random, text: str) -> str:
    """Return a text with one change: of a number, a word, a line, a character, or of how deep or long something is."""
    kind = random.randrange(12)
    if kind <= 2 and (found := list(re.finditer(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text))):
        return _put(text, random.choice(found).span(), _odd_number(random))
    if kind <= 5 and (found := list(re.finditer(r"\w+", text))):
        word = random.choice(found)
        other = random.choice((random.choice(found).group(), _odd_word(random), _odd_word(random), _odd_number(random)))
        return _put(text, word.span(), other)
    if kind <= 7:
        lines = text.splitlines(keepends=True) or [""]
        at, other = random.randrange(len(lines)), random.randrange(len(lines))
        changes = {
            "removed": [*lines[:at], *lines[at + 1 :]],
            "twice": [*lines[: at + 1], *lines[at:]],
            "moved": [*lines[:at], lines[other], *lines[at:other], *lines[other + 1 :]],
            "often": [*lines[:at], *lines[at : at + 2] * random.choice((3, 30)), *lines[at:]],
            "joined": [*lines[:at], lines[at].rstrip(), *lines[at + 1 :]],
        }
        return "".join(changes[random.choice(list(changes))])
    at = random.randrange(len(text) + 1)
    if kind == 8:
        opening, closing = random.choice(NESTS)
        depth = random.choice((1, 2, 30, 30, 300, 1500, 100_000 if random.random() < 0.2 else 20))
        return text[:at] + opening * depth + closing * random.choice((0, depth)) + text[at:]
    if kind == 9:
        times = 150_000 if random.random() < 0.05 else random.choice((2, 5, 70, 700))
        return text[:at] + text[at : at + random.choice((1, 1, 3))] * times + text[at:]
    if kind == 10:
        return _put(text, (at, at + random.choice((1, 3, 20))), "")
    return _put(text, (at, at + random.choice((0, 0, 1))), _odd_word(random))


def _put(text: str, span: tuple[int, int], new: str) -> str:
    return text[: span[0]] + new + text[span[1] :]


def _odd_number(random: Random) -> str:
    if random.random() < 0.1:
        return random.choice("19") * random.choice((20, 400, 5000)) + random.choice(("", "", "x", ".5"))
    if random.random() < 0.01:
        return "1" * 120_000 + random.choice(("", "x"))
    if random.random() < 0.2:
        return str(random.choice(NUMBERS) * random.choice((1, -1)))
    return random.choice(NUMBER_TEXTS)


def _odd_word(random: Random) -> str:
    if random.random() < 0.05:
        return random.choice(("a", "é", "a b ", "\\")) * random.choice((70, 700, 5000))
    if random.random() < 0.1:
        return chr(
            random.choice((random.randrange(32), random.randrange(127, 0xD800), random.randrange(0xE000, 0x110000)))
        )
    return random.choice(WORDS)


# JSON.


def odd_value(random: Random) -> object:
    """Return a value that few expect."""
    deep: object = 0
    for _ in range(random.choice((2, 100, 900)) if random.random() < 0.1 else 0):
        deep = [deep] if random.random() < 0.5 else {"a": deep}
    number = random.choice(NUMBERS) * random.choice((1, -1))
    simple = [
        None,
        True,
        False,
        0,
        -1,
        0.5,
        "",
        [],
        {},
        [None],
        {"": None},
        [0, 0, 0],
        1e308,
        float("nan"),
        float("inf"),
        deep,
    ]
    return random.choice(
        (*simple, number, number, 10 ** random.choice((20, 400)), _odd_word(random), [number], {"a": number})
    )


def change_value(random: Random, value: object) -> object:
    """Return a JSON value with one change, anywhere in it."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return odd_value(random)
    kind = random.randrange(8)
    if isinstance(value, dict):
        key = random.choice(list(value))
        if kind == 0:
            return {name: one for name, one in value.items() if name != key}
        if kind == 1:
            return {(_odd_word(random) if name == key else name): one for name, one in value.items()}
        if kind == 2:
            return {**value, _odd_word(random): odd_value(random)}
        return {**value, key: change_value(random, value[key])}
    at = random.randrange(len(value))
    if kind == 0:
        return [*value[:at], *value[at + 1 :]]
    if kind == 1:
        return [*value[:at], value[at], *value[at:]]
    if kind == 2:
        return [*value[:at], odd_value(random), *value[at:]]
    return [*value[:at], change_value(random, value[at]), *value[at + 1 :]]


def _change_json(random: Random, content: bytes) -> bytes:
    """Change a JSON value; of JSON lines, one of them."""
    lines = content.splitlines() if content[:1] == b"{" and content.count(b"\n{") else [content]
    at = random.randrange(len(lines))
    lines[at] = json.dumps(change_value(random, json.loads(lines[at]))).encode()
    return b"\n".join(lines) + b"\n"


# Archives.


@lru_cache(maxsize=64)
def _zip_members(content: bytes) -> tuple[tuple[str, bytes], ...]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return tuple((one.filename, archive.read(one)) for one in archive.infolist())


def _change_zip(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change a member, or the list of members; checksums and lengths are right."""
    members = list(_zip_members(content))
    at, kind = random.randrange(len(members)), random.randrange(10)
    name, inner = members[at]
    if kind == 0:
        del members[at]
    elif kind == 1:
        members[at] = (
            random.choice([_odd_word(random), *(other for other, _ in members), f"../{name}", f"/{name}"]),
            inner,
        )
    elif kind == 2:
        members.append((random.choice((name, "extra.npy", "../up.npy")), inner))
    else:
        members[at] = (name, change(random, inner, [other for _, other in members]))
    stored, buffer = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", stored, compresslevel=1) as archive:
        for name, inner in members:
            archive.writestr(zipfile.ZipInfo(name.replace("\0", "") or "_"), inner, stored)
    return buffer.getvalue()


TAR_TYPES = [
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
    tarfile.DIRTYPE,
    b"S",
    b"x",
]


def _change_tar(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change a member's content, name, size or type; checksums are right."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        members = [(one, archive.extractfile(one).read()) for one in archive.getmembers() if one.isfile()]
    at = random.randrange(len(members))
    info, inner = members[at]
    kind = random.randrange(7)
    if kind == 0:
        info.name = random.choice(["../up", "/etc/passwd", *(one.name for one, _ in members)])
    elif kind == 1:
        info.type, info.linkname = random.choice(TAR_TYPES), random.choice(("../up", "/etc/passwd", info.name))
    elif kind == 2:
        info.pax_headers = {
            random.choice(("size", "path", "GNU.sparse.realsize", "GNU.sparse.size", "GNU.sparse.map")): "99999999"
        }
    elif kind == 3:
        del members[at]
    else:
        members[at] = info, change(random, inner, [])
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=random.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    ) as archive:
        for info, inner in members:
            info.size = len(inner)
            archive.addfile(info, io.BytesIO(inner))
    made = bytearray(buffer.getvalue())
    if random.random() < 0.2:  # a size that is not the content's, with the header's right checksum
        made[124:136] = b"%011o\0" % random.choice((0, 3073, 2**20, 8 * 3073 * 2**17, 2**33 - 1))
        made[148:156] = b" " * 8
        made[148:156] = b"%06o\0 " % sum(made[:512])
    return bytes(made)


# Arrays and tensors.


def _change_npy(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change the text of an array's header, whose length is right, or its values."""
    length = int.from_bytes(content[8:10], "little")
    text, values = content[10 : 10 + length], content[10 + length :]
    kind = random.randrange(6)
    if kind == 0:
        values = change_bytes(random, values, others)
    elif kind == 1:
        types = [
            b"|O",
            b"<U1",
            b"<f8",
            b">f4",
            b"|b1",
            b"<M8[s]",
            b"|V0",
            b"<U0",
            b"<c8",
            b"|S3",
            b"<u8",
            b"<f2",
            b"<i8",
            b">U2",
        ]
        text = re.sub(rb"'[<>|=][a-zA-Z]\d+'", repr(random.choice(types).decode()).encode(), text)
    elif kind == 2:
        count = random.choice(NUMBERS)
        shape = random.choice(
            (f"({count},)", f"({count}, 1)", f"(0, {count})", f"({count}, {count}, {count})", "()", "(-1,)")
        )
        text = re.sub(rb"\([^)]*\)", shape.encode(), text)
    else:
        text = change_text(random, text.decode("latin1")).encode("utf-8", "replace")
    text = text[:65000]
    return content[:8] + struct.pack("<H", len(text)) + text + values


@lru_cache(maxsize=64)
def _mat_elements(content: bytes) -> tuple[tuple[int, bytes], ...]:
    found, at = [], 128
    while at + 8 <= len(content):
        kind, size = struct.unpack_from("<II", content, at)
        inner = content[at + 8 : at + 8 + size]
        found.append((kind, zlib.decompress(inner) if kind == 15 else content[at : at + 8 + size]))
        at += 8 + size
    return tuple(found)


def _change_mat(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change a variable: its header is 48 bytes, then come the values. Compressed variables are compressed again."""
    elements = list(_mat_elements(content))
    at = random.randrange(len(elements))
    kind, inner = elements[at]
    head, rest = inner[:64], inner[64:]
    choice = random.randrange(4)
    if choice == 0:
        inner = change_bytes(random, inner, others)
    elif choice == 1:  # an integer of the header
        place = 4 * random.randrange(16)
        head = head[:place] + (random.choice(NUMBERS) % 2**32).to_bytes(4, "little") + head[place + 4 :]
        inner = head + rest
    elif choice == 2:  # the class of the array: cells, structures, objects, texts, sparse ones, ...
        inner = head[:16] + bytes([random.randrange(20)]) + head[17:] + rest
    else:
        inner = change_bytes(random, head, others) + rest
    elements[at] = random.choice((kind, 15, 14)), inner
    packed = [
        struct.pack("<II", 15, len(body := zlib.compress(inner, 1))) + body if kind == 15 else inner
        for kind, inner in elements
    ]
    return content[:128] + b"".join(packed)


def _change_tensor_header(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change the JSON header of a safetensors file; its length is right."""
    size = int.from_bytes(content[:8], "little")
    head, values = content[8 : 8 + size], content[8 + size :]
    if random.random() < 0.6:
        head = json.dumps(change_value(random, json.loads(head))).encode()
    else:
        head = change_text(random, head.decode()).encode(errors="replace")
    return len(head).to_bytes(8, "little") + head + values


@lru_cache(maxsize=64)
def tensors_of(content: bytes) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of one of fedobp's files, and the JSON of its metadata."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return load(content), header["__metadata__"]["fedobp"]


def sealed(tensors: dict[str, torch.Tensor], about: object) -> bytes:
    """Return fedobp's file of tensors, with the right checksum; of metadata that are no table, without."""
    if isinstance(about, dict):
        about = {name: value for name, value in about.items() if name not in ("format", "sha256")}
        about = {"format": tensor_file.FORMAT, "sha256": tensor_file._checksum(tensors, about), **about}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"fedobp": json.dumps(about)})


def _change_tensors(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change a tensor or the metadata of one of fedobp's files, and compute its checksum again."""
    found, text = tensors_of(content)
    tensors, about = dict(found), json.loads(text)
    if not tensors or random.random() < 0.5:
        return sealed(tensors, change_value(random, about))
    name = random.choice(list(tensors))
    tensor = tensors[name]
    kind = random.randrange(7)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[random.choice((_odd_word(random), "0.index", "0.vector", "records.0.x", name + "."))] = tensors.pop(
            name
        )
    elif kind == 2:
        tensors[name] = tensor.to(random.choice((torch.int64, torch.bool, torch.float64, torch.uint8, torch.bfloat16)))
    elif kind == 3:
        tensors[name] = tensor.reshape(-1)[: random.randrange(3)].clone()
    elif kind == 4:
        tensors[name] = torch.full_like(
            tensor, random.choice((0, 1, -1, 2**31) if not tensor.is_floating_point() else (0.0, float("nan")))
        )
    elif kind == 5:
        tensors[name] = tensor[None].clone()
    else:
        other = random.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other].clone(), tensor.clone()
    return sealed(tensors, about)


def _change_message(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change the header of a message, whose length is right, or its payload."""
    size = struct.unpack_from("<I", content, 5)[0]
    head, payload = content[9 : 9 + size], content[9 + size :]
    kind = random.randrange(3)
    if kind == 0:
        payload = change_bytes(random, payload, others)
    elif kind == 1:
        head = json.dumps(change_value(random, json.loads(head))).encode()
    else:
        head = change_text(random, head.decode()).encode(errors="replace")
    return content[:5] + struct.pack("<I", len(head)) + head + payload


def _change_png(random: Random, content: bytes, others: list[bytes]) -> bytes:
    """Change a chunk of a PNG image; its length and checksum are right."""
    chunks, at = [], 8
    while at + 12 <= len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += 12 + size
    at = random.randrange(len(chunks))
    kind, inner = chunks[at]
    choice = random.randrange(5)
    if choice == 0:
        kind = random.choice((b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"zTXt", b"iCCP", b"acTL", b"fcTL", b"eXIf"))
    elif choice == 1:
        chunks.append((kind, inner))
    elif choice == 2 and kind == b"IDAT":
        inner = zlib.compress(change_bytes(random, zlib.decompress(inner), others))
    else:
        inner = change_bytes(random, inner, others)
    chunks[at] = kind, inner
    parts = (
        len(inner).to_bytes(4, "big") + kind + inner + zlib.crc32(kind + inner).to_bytes(4, "big")
        for kind, inner in chunks
    )
    return content[:8] + b"".join(parts)
