"""Text to ids and back, with the files a target ships: tokenizer.json, SentencePiece, or Llama 3's tiktoken ranks.
Knows nothing of models or tensors. A token stands for bytes and text is their UTF-8: a stream decodes nothing twice."""

import base64
import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path

import jinja2
import jinja2.ext
import sentencepiece
import tiktoken
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from speculators_config import ConfigError, read_json

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Codec:
    """What a tokenizer library does, whichever of the three it is."""

    encode: Callable[[str], list[int]]  # plain text, no BOS
    encode_marked: Callable[[str], list[int]]  # names of special tokens in the text become their ids
    token_bytes: Callable[[int], bytes]  # b"" for special tokens and for the padded rows past the vocabulary
    token_id: Callable[[str], int | None]
    bos_ids: list[int]  # what plain text starts with
    strips_space: bool  # SentencePiece puts a space in front of every text, and takes it away again
    eos_id: int | None  # where the configs name none


@dataclass(frozen=True)
class Tokenizer:
    """A target's tokenizer with its chat template, which sees `special_names`: {"bos_token": "<s>", ...}."""

    codec: Codec
    special_names: dict[str, str]
    eos_id: int | None
    chat_template: str | None
    template_path: Path | None  # for messages

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """The ids of plain text, after BOS where this tokenizer adds one (bos=False: never)."""
        require_unicode(text)
        return (self.codec.bos_ids if bos else []) + self.codec.encode(text)

    def encode_chat(self, messages: list[dict], **template_kwargs) -> list[int]:
        """The ids of a rendered conversation. The template writes BOS itself; none is added."""
        text = self.render_chat(messages, **template_kwargs)
        require_unicode(text)
        return self.codec.encode_marked(text)

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = True, **template_kwargs) -> str:
        """The template's text for [{"role": ..., "content": ...}, ...]. ConfigError with its own objection."""
        assert self.has_chat_template, "render_chat without a chat template"
        # transformers always passes these two; templates ask `tools is none` as well as `tools is defined`.
        names = {"tools": None, "documents": None} | self.special_names | template_kwargs
        try:
            template = template_environment().from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # a template is foreign code and may raise anything
            problem = f"{self.template_path}: chat_template: {one_line(error)}"
            raise ConfigError(f"{problem}; change the messages, or pass --raw to do without the template") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens and without an unfinished character at the end. Spaces stay as the
        model wrote them: transformers' clean-up would rewrite what has been streamed already."""
        stream = TextStream(self)
        return "".join(stream.push(token_id)[0] for token_id in ids)


class TextStream:
    """One answer's text, token by token: the pieces, with finish(), are decode(ids) up to the stop text.
    Without a tokenizer every token's text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()):
        assert "" not in stops, f"an empty stop text among {stops}"
        self.token_bytes = tokenizer.codec.token_bytes if tokenizer else lambda token_id: b""
        self.strip_space = tokenizer is not None and tokenizer.codec.strips_space
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds the bytes of an unfinished character
        self.stops = tuple(stops)
        self.held = ""  # may be the start of a stop text
        self.stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that is safe to print now, and whether this token completed a stop text (then nothing may follow).
        Of several stop texts completed by one token, the one that starts first cuts."""
        assert not self.stopped, f"token {token_id} after the one that completed a stop text"
        data = self.token_bytes(token_id)
        if data and self.strip_space:
            data, self.strip_space = data.removeprefix(b" "), False
        text = self.held + self.utf8.decode(data)
        cuts = [at for at in map(text.find, self.stops) if at >= 0]
        self.stopped = bool(cuts)
        safe = min(cuts) if cuts else len(text) - self.stop_start(text)
        self.held = "" if cuts else text[safe:]
        return text[:safe], self.stopped

    def stop_start(self, text: str) -> int:
        """How many characters at the end of text could be the start of a stop text."""
        longest = max(map(len, self.stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)

    def finish(self) -> str:
        """What was held for a stop text that never came."""
        text, self.held = self.held, ""
        return text


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a checkpoint's folder; None where there is neither tokenizer.json nor tokenizer.model.
    ConfigError for files that cannot be read."""
    config = {
        key: value
        for key, value in read_json(folder / "tokenizer_config.json", optional=True).items()
        if value is not None
    }
    config = read_json(folder / "special_tokens_map.json", optional=True) | config
    # A name is "<s>" or {"content": "<s>", ...}; add_bos_token and the like are booleans.
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))}
    names = {key: value if isinstance(value, str) else value.get("content", "") for key, value in tokens.items()}
    if (path := folder / "tokenizer.json").exists():
        codec = tokenizer_json_codec(path, config.get("add_bos_token"), names.get("bos_token", ""))
    elif (path := folder / "tokenizer.model").exists():
        data = path.read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", data):
            codec = tiktoken_codec(path, data, config.get("add_bos_token", True))
        else:
            codec = sentencepiece_codec(path, data, config)
    else:
        return None
    eos_id = codec.token_id(names.get("eos_token", ""))
    return Tokenizer(codec, names, codec.eos_id if eos_id is None else eos_id, *read_chat_template(folder))


def tokenizer_json_codec(path: Path, add_bos: bool | None, bos_name: str) -> Codec:
    """tokenizer.json, by the `tokenizers` library. BOS is what its post-processor adds, unless the config says."""
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise damaged(path, "tokenizer", one_line(error)) from error
    library.no_truncation()  # left in the file by some training run
    library.no_padding()
    special = {token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special}
    decoder = json.loads(library.decoder.__getstate__()) if library.decoder else None
    spelling_bytes, strips_space = read_decoder(decoder, path)

    def encode(text: str) -> list[int]:
        return library.encode(text, add_special_tokens=False).ids

    def token_bytes(token_id: int) -> bytes:
        spelling = None if token_id in special else library.id_to_token(token_id)
        return b"" if spelling is None else spelling_bytes(spelling)

    bos_ids = list(takewhile(special.__contains__, library.encode("x").ids))
    bos_id = library.token_to_id(bos_name)
    if add_bos is False:
        bos_ids = []
    elif add_bos and not bos_ids and bos_id is not None:
        bos_ids = [bos_id]
    return Codec(encode, encode, token_bytes, library.token_to_id, bos_ids, strips_space, eos_id=None)


def read_decoder(decoder: dict | None, path: Path) -> tuple[Callable[[str], bytes], bool]:
    """tokenizer.json's `decoder` as a function from a token's spelling to its bytes, and `strips_space`."""
    replaced, byte_level, byte_fallback, strips_space = [], {}, False, False
    for step in decoder.get("decoders", [decoder]) if decoder else [None]:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = byte_level_alphabet()
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                replaced.append((old, " "))
                strips_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                problem = f"{path}: decoder: {json.dumps(step)[:80]} is not implemented"
                raise ConfigError(f"{problem}; use a target whose decoder is ByteLevel, ByteFallback or Metaspace")

    def spelling_bytes(spelling: str) -> bytes:
        for old, new in replaced:
            spelling = spelling.replace(old, new)
        if byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", spelling):
            return bytes.fromhex(spelling[3:5])
        if byte_level and all(char in byte_level for char in spelling):
            return bytes(byte_level[char] for char in spelling)
        return spelling.encode()

    return spelling_bytes, strips_space


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def sentencepiece_codec(path: Path, data: bytes, config: dict) -> Codec:
    """SentencePiece's tokenizer.model."""
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=data)
        # No space goes in front of text that follows a special token. Serialised messages merge when joined, and this
        # tail says normalizer_spec (field 3) { add_dummy_prefix (field 3): false }.
        unspaced = sentencepiece.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
    except RuntimeError as error:
        raise damaged(path, "tokenizer", "is neither a SentencePiece model nor base64 ranks") from error
    size = library.get_piece_size()
    added_tokens = read_json(path.parent / "added_tokens.json", optional=True)
    added = [*map(int, config.get("added_tokens_decoder", {})), *added_tokens.values()]
    if max(added, default=0) >= size:
        problem = f"{path}: vocabulary: tokenizer_config.json or added_tokens.json adds to its {size} tokens"
        raise ConfigError(f"{problem}, which is not implemented; save this tokenizer as tokenizer.json")
    special = {library.id_to_piece(i): i for i in range(size) if library.is_control(i) or library.is_unknown(i)}
    names = re.compile("(" + "|".join(map(re.escape, special)) + ")")
    after_special = library if config.get("legacy") else unspaced

    def encode_marked(text: str) -> list[int]:
        first, *rest = names.split(text)  # text, name, text, name, text
        ids = library.encode(first)
        for name, after in zip(rest[::2], rest[1::2], strict=True):
            ids += [special[name], *after_special.encode(after)]
        return ids

    def token_bytes(token_id: int) -> bytes:
        if not 0 <= token_id < size or (piece := library.id_to_piece(token_id)) in special:
            return b""
        if library.is_byte(token_id):  # spelled <0x0A>
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    bos_ids = [library.bos_id()] if config.get("add_bos_token", True) and library.bos_id() >= 0 else []
    eos_id = library.eos_id() if library.eos_id() >= 0 else None
    strips_space = library.encode("x") != unspaced.encode("x")
    return Codec(library.encode, encode_marked, token_bytes, special.get, bos_ids, strips_space, eos_id)


def tiktoken_codec(path: Path, data: bytes, add_bos: bool) -> Codec:
    """Llama 3's tokenizer.model: a base64 token and its rank a line, then 256 special tokens that no file lists."""
    ranks = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise damaged(path, f"line {number}", "is not a base64 token and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise damaged(path, "ranks", f"are not 0 to {len(ranks) - 1}, once each")
    reserved = [f"reserved_special_token_{i}" for i in range(251)]
    names = ["begin_of_text", "end_of_text", *reserved[:4], "start_header_id", "end_header_id", reserved[4], "eot_id"]
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names + reserved[5:])}
    library = tiktoken.Encoding(path.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    bytes_of = {rank: token for token, rank in ranks.items()}
    return Codec(
        encode=library.encode_ordinary,
        encode_marked=partial(library.encode, allowed_special="all"),
        token_bytes=lambda token_id: bytes_of.get(token_id, b""),
        token_id=special.get,
        bos_ids=[special["<|begin_of_text|>"]] if add_bos else [],
        strips_space=False,
        eos_id=special["<|end_of_text|>"],
    )


def read_chat_template(folder: Path) -> tuple[str | None, Path | None]:
    """The template and the file it is in: chat_template.jinja, chat_template.json or tokenizer_config.json."""
    if (path := folder / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8", errors="replace"), path
    for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        template = read_json(path, optional=True).get("chat_template")
        if isinstance(template, list):  # [{"name": ..., "template": ...}, ...]
            named = {entry.get("name"): entry.get("template") for entry in template}
            if "default" not in named:
                raise ConfigError(f"{path}: chat_template: none is named 'default'; rename the one to use")
            template = named["default"]
        if template is not None:
            return template, path
    return None, None


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which marks the assistant's words for training: here only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for, transformers' settings; a sandbox, because a checkpoint is not to be trusted."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols", GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own writes < as \\u003c
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def stop_token_ids(folder: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end an answer: `eos_token_id` of config.json and generation_config.json, and the tokenizer's EOS."""
    ids = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    for path in (folder / "config.json", folder / "generation_config.json"):
        value = read_json(path, optional=True).get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in found):
            raise ConfigError(f"{path}: eos_token_id: {value!r} is not an id, a list of ids or null; correct it")
        ids.update(found)
    return frozenset(ids)


def require_unicode(text: str) -> None:
    """Command-line bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt: text: character {error.start} is not valid Unicode; write it in UTF-8") from error


def damaged(path: Path, field: str, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {field}: {problem}; download the file again")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
