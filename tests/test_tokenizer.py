"""Ids, chats and streams against what the libraries themselves answered (tests/fixtures/tokenizers/*/expected.json)."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders

from speculators_config import ConfigError
from tokenizer import TextStream, Tokenizer, load_tokenizer, stop_token_ids

FIXTURES = Path(__file__).parent / "fixtures" / "tokenizers"
KINDS = ["bpe_llama3", "bpe_qwen", "sentencepiece", "tiktoken"]
EXPECTED = {kind: json.loads((FIXTURES / kind / "expected.json").read_text(encoding="utf-8")) for kind in KINDS}
STRINGS = [(kind, case) for kind in KINDS for case in EXPECTED[kind]["strings"]]
CHATS = [(kind, case) for kind in KINDS for case in EXPECTED[kind]["chat"]]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def loaded() -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(FIXTURES / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def llama2(tmp_path_factory) -> Tokenizer:
    """The SentencePiece vocabulary as the tokenizer.json of a Llama 2: its decoder, byte fallback included."""
    return load_tokenizer(llama2_folder(tmp_path_factory.mktemp("llama2")))


def llama2_folder(folder: Path) -> Path:
    model = sentencepiece.SentencePieceProcessor(str(FIXTURES / "sentencepiece" / "tokenizer.model"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.save(str(folder / "tokenizer.json"))
    return folder


def copy(kind: str, folder: Path, **config) -> Path:
    """A fixture's folder, with these fields of tokenizer_config.json changed (None: left out)."""
    shutil.copytree(FIXTURES / kind, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


def stream_pieces(tokenizer: Tokenizer, ids: list[int], stops: list[str] = ()) -> tuple[list[str], int | None]:
    """What is printed after each token, finish() last, and the index of the token that completed a stop text."""
    stream, pieces = TextStream(tokenizer, stops), []
    for index, token_id in enumerate(ids):
        text, stopped = stream.push(token_id)
        pieces.append(text)
        if stopped:
            return [*pieces, stream.finish()], index
    return [*pieces, stream.finish()], None


# Text to ids


@pytest.mark.parametrize(("kind", "case"), STRINGS)
def test_ids_are_the_librarys(kind, case, loaded):
    assert loaded[kind].encode(case["text"]) == case["ids"]
    assert loaded[kind].encode(case["text"], bos=False) == case["ids_without_special"]


@pytest.mark.parametrize(("kind", "case"), STRINGS)
def test_decode_gives_the_librarys_text(kind, case, loaded):
    expected = case.get("decoded_skip_special", case["decoded"])
    assert loaded[kind].decode(case["ids"]) == expected
    assert loaded[kind].decode(case["ids_without_special"]) == expected


@pytest.mark.parametrize(("kind", "case"), CHATS)
def test_chat_is_rendered_and_has_one_bos(kind, case, loaded):
    kwargs = {"add_generation_prompt": case["add_generation_prompt"]} | case.get("template_kwargs", {})
    assert loaded[kind].render_chat(case["messages"], **kwargs) == case["rendered"]
    assert loaded[kind].encode_chat(case["messages"], **kwargs) == case["ids"]


def test_generation_prompt_is_the_default(loaded):
    assert loaded["bpe_qwen"].render_chat(HI).endswith("<|im_start|>assistant\n")


def test_tiktoken_names_all_256_special_tokens(loaded):
    expected, codec = EXPECTED["tiktoken"], loaded["tiktoken"].codec
    for name, token_id in expected["special_tokens_first_16"].items():
        assert codec.token_id(name) == token_id
    assert codec.token_id("<|reserved_special_token_250|>") == expected["n_ranks"] + expected["n_special"] - 1


@pytest.mark.parametrize("kind", ["bpe_llama3", "sentencepiece", "tiktoken"])
def test_add_bos_token_false_is_obeyed(kind, tmp_path):
    tokenizer = load_tokenizer(copy(kind, tmp_path, add_bos_token=False))
    assert tokenizer.encode("Hello, world!") == EXPECTED[kind]["strings"][1]["ids_without_special"]


def test_add_bos_token_true_adds_what_the_post_processor_does_not(tmp_path):
    tokenizer = load_tokenizer(copy("bpe_qwen", tmp_path, add_bos_token=True, bos_token="<|endoftext|>"))
    assert tokenizer.encode("Hi") == [295, *tokenizer.encode("Hi", bos=False)]


def test_truncation_left_in_the_file_is_ignored(tmp_path):
    """A file saved after training with max_length 4 must not cut a prompt to 4 tokens."""
    path = copy("bpe_llama3", tmp_path) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(path))
    assert load_tokenizer(tmp_path).encode("Hello, world!") == EXPECTED["bpe_llama3"]["strings"][1]["ids"]


def test_legacy_sentencepiece_puts_a_space_after_special_tokens(tmp_path, loaded):
    legacy = load_tokenizer(copy("sentencepiece", tmp_path, legacy=True))
    space = loaded["sentencepiece"].encode("", bos=False) + [334]
    assert legacy.encode_chat(HI) == [1, *space, *loaded["sentencepiece"].encode_chat(HI)[1:]]


# Chat templates


def chat(folder: Path, template: str | list, **config) -> Tokenizer:
    return load_tokenizer(copy("bpe_llama3", folder, chat_template=template, **config))


def test_templates_get_what_transformers_gives_them(tmp_path):
    template = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "    {%- endfor %}\n"
        "{{ eos_token }}{{ tools is none }}{{ strftime_now('%Y') | length }}{{ unknown }}"
    )
    tokenizer = chat(tmp_path, template, eos_token={"__type": "AddedToken", "content": "<|eom_id|>"})
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no more"}]
    assert tokenizer.render_chat(messages) == '{"role": "user", "content": "<é>"}<|eom_id|>True4'
    assert tokenizer.eos_id == 317


def test_the_default_of_several_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert chat(tmp_path, named).render_chat(HI) == "yes"
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: chat_template: none is named 'default'; rename"):
        chat(tmp_path, named[:1])


@pytest.mark.parametrize(
    ("name", "text"), [("chat_template.jinja", "file"), ("chat_template.json", '{"chat_template": "file"}')]
)
def test_a_template_file_comes_before_the_config(name, text, tmp_path):
    (copy("bpe_llama3", tmp_path, chat_template="config") / name).write_text(text)
    assert load_tokenizer(tmp_path).render_chat(HI) == "file"
    (tmp_path / name).write_text(text.replace("file", "{{ raise_exception('no') }}"))
    with pytest.raises(ConfigError, match=rf"{name}: chat_template: no; change the messages"):
        load_tokenizer(tmp_path).encode_chat(HI)


def test_without_a_template(tmp_path, loaded):
    assert not load_tokenizer(copy("bpe_llama3", tmp_path, chat_template=None)).has_chat_template
    assert all(tokenizer.has_chat_template for tokenizer in loaded.values())


def test_the_templates_own_objection_reaches_the_user(loaded):
    with pytest.raises(ConfigError) as caught:
        loaded["sentencepiece"].encode_chat(HI + HI)
    path = FIXTURES / "sentencepiece" / "tokenizer_config.json"
    assert str(caught.value) == (
        f"{path}: chat_template: roles must alternate; change the messages, or pass --raw to do without the template"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ 1 + none }}", "unsupported operand"),
        ("{{ a.b }}", "'a' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "access to attribute '__init__'"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template, words, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template: .*; change the messages") as caught:
        chat(tmp_path, template).encode_chat(HI)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# Ids to text


@pytest.mark.parametrize("kind", KINDS)
def test_ids_past_the_vocabulary_are_no_text(kind, loaded):
    ids = EXPECTED[kind]["strings"][1]["ids"]
    padded = [100_000, *ids[:4], 2**31, *ids[4:], EXPECTED[kind]["vocab_size"]]
    assert loaded[kind].decode(padded) == loaded[kind].decode(ids) == "Hello, world!"


def test_added_tokens_that_are_not_special_are_text(loaded):
    assert loaded["bpe_qwen"].decode([298, 39, 299, 297]) == "<think>H</think>"


def test_spaces_are_not_cleaned_up(loaded):
    """bpe_llama3 says clean_up_tokenization_spaces: true, which would turn this into "Hello, it's"."""
    text = "Hello , it 's"
    assert loaded["bpe_llama3"].decode(loaded["bpe_llama3"].encode(text)) == text


def random_ids(tokenizer: Tokenizer, size: int, seed: int) -> list[int]:
    """Words, cut emoji and CJK, special tokens and padded rows, any of them interrupted by any other."""
    rng = random.Random(seed)
    texts = ["😀👍🏽", "你好,世界", "é\u2028ß", " a  b", "�", "Привет"]
    ids = []
    while len(ids) < 40:
        word = tokenizer.encode(rng.choice(texts), bos=False)
        ids += rng.choice([word, word[: rng.randint(0, len(word))], [rng.randrange(size + 20)]])
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(50))
def test_random_ids_decode_like_the_library(kind, seed, loaded):
    """Invalid UTF-8 included, where the library replaces it as Python does; SentencePiece writes one mark a byte."""
    tokenizer, size = loaded[kind], EXPECTED[kind]["vocab_size"]
    ids = random_ids(tokenizer, size, seed)
    known = [i for i in ids if i < size]
    if kind == "sentencepiece":
        library = sentencepiece.SentencePieceProcessor(str(FIXTURES / kind / "tokenizer.model"))
        expected = library.decode([i for i in known if i > 2])
    elif kind == "tiktoken":
        ranks = EXPECTED[kind]["n_ranks"]
        expected = b"".join(tokenizer.codec.token_bytes(i) for i in known if i < ranks).decode("utf-8", "replace")
    else:
        library = tokenizers.Tokenizer.from_file(str(FIXTURES / kind / "tokenizer.json"))
        expected = library.decode(known, skip_special_tokens=True)
    text = tokenizer.decode(ids)
    if kind == "sentencepiece":
        assert text.replace("�", "") == expected.replace("�", "")
    else:
        assert text == expected or text == expected.removesuffix("�")


@pytest.mark.parametrize("seed", range(20))
def test_byte_fallback_in_tokenizer_json_decodes_like_sentencepiece(seed, llama2, loaded):
    ids = random_ids(loaded["sentencepiece"], 460, seed)
    assert llama2.decode(ids) == loaded["sentencepiece"].decode(ids)


def test_llama2_decoder_gives_the_librarys_text(llama2):
    for case in EXPECTED["sentencepiece"]["strings"]:
        assert llama2.decode(case["ids"]) == case["decoded"]


def test_metaspace_decoder(tmp_path):
    path = llama2_folder(tmp_path) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    ids = [274, 334, 347, 260]  # _the _ . _t
    for scheme, text in [("always", "the . t"), ("never", " the . t")]:
        library.decoder = decoders.Metaspace("\u2581", scheme)
        library.save(str(path))
        assert load_tokenizer(tmp_path).decode(ids) == library.decode(ids) == text


# Streams


@pytest.mark.parametrize(("kind", "case"), STRINGS)
def test_stream_is_the_text_and_prints_each_character_at_once(kind, case, loaded):
    pieces, _ = stream_pieces(loaded[kind], case["ids"])
    text = case.get("decoded_skip_special", case["decoded"])
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    for end in range(len(case["ids"])):  # nothing finished is held back
        assert "".join(pieces[: end + 1]) == loaded[kind].decode(case["ids"][: end + 1])


def test_each_byte_of_an_emoji_waits_for_the_last(loaded):
    ids = loaded["sentencepiece"].encode("😀", bos=False)[1:]
    assert stream_pieces(loaded["sentencepiece"], ids)[0] == ["", "", "", "😀", ""]
    assert stream_pieces(loaded["sentencepiece"], ids[:3])[0] == ["", "", "", ""]  # an unfinished end is left out
    broken = [*ids[:3], *loaded["sentencepiece"].encode("b", bos=False)[1:], *ids]
    assert "".join(stream_pieces(loaded["sentencepiece"], broken)[0]) == "�b😀"  # in the middle it is not


def test_a_replacement_character_the_model_wrote_is_printed_at_once(loaded):
    for tokenizer in loaded.values():
        ids = tokenizer.encode("�", bos=False)
        stream = TextStream(tokenizer)
        assert "".join(stream.push(i)[0] for i in ids).lstrip(" ") == "�"


def test_the_first_space_goes_once_and_only_in_front(loaded):
    # <s> _ [padded] el _ _the: SentencePiece's own space is the first one
    assert stream_pieces(loaded["sentencepiece"], [1, 334, 9999, 277, 334, 274])[0] == [
        "",
        "",
        "",
        "el",
        " ",
        " the",
        "",
    ]
    assert stream_pieces(loaded["bpe_llama3"], [220, 39])[0] == [" ", "H", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_cost_does_not_grow_with_the_answer(kind, loaded):
    """50 000 tokens take a quarter of a second; decoding the answer anew for each would take an hour."""
    tokenizer = loaded[kind]
    ids = tokenizer.encode("Hello 😀 ", bos=False)
    stream = TextStream(tokenizer, ["Hello 😁", "never"])
    start = time.perf_counter()
    for count in range(50_000):
        stream.push(ids[count % len(ids)])
        assert len(stream.held) < 8
        assert time.perf_counter() - start < 30
    assert len(stream.utf8.getstate()[0]) < 4


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None)
    assert stream.push(5) == ("", False)
    assert stream.finish() == ""


# Stop texts


def letters(loaded: dict, text: str) -> list[int]:
    """One token a letter (bpe_qwen has no merge of these)."""
    ids = [loaded["bpe_qwen"].codec.token_id(char) for char in text]
    assert None not in ids
    return ids


@pytest.mark.parametrize(
    ("text", "stops", "printed", "index"),
    [
        ("xxabcyy", ["abc"], "xx", 4),  # spans tokens
        ("xxabcyy", ["abc", "bc"], "xx", 4),  # one token completes both: the one that starts first
        ("xxabcyy", ["abc", "b"], "xxa", 3),  # the one that is complete first, though another started before
        ("xxabcyy", ["ab", "abc"], "xx", 3),  # a stop text that begins another
        ("xxabx", ["abc"], "xxabx", None),  # began and did not come
        ("xxab", ["abc"], "xxab", None),  # the answer ends inside
        ("aaab", ["aab"], "a", 3),  # a second start inside the first
        ("ababac", ["abac"], "ab", 5),
        ("abc", ["abc"], "", 2),
        ("abc", [], "abc", None),
    ],
)
def test_stop_texts_cut_at_the_token_that_completes_them(text, stops, printed, index, loaded):
    pieces, stopped_at = stream_pieces(loaded["bpe_qwen"], letters(loaded, text), stops)
    assert ("".join(pieces), stopped_at) == (printed, index)


def test_a_stop_text_inside_one_token(loaded):
    tokenizer = loaded["bpe_llama3"]
    ids = tokenizer.encode("Go the", bos=False)
    assert ids[-1] == tokenizer.codec.token_id("Ġthe")
    pieces, index = stream_pieces(tokenizer, [*ids, 39, 39], ["h"])
    assert ("".join(pieces), index) == ("Go t", len(ids) - 1)
    # "the" is complete in the same token as " t": the one that starts first cuts
    assert "".join(stream_pieces(tokenizer, ids, ["the", " t"])[0]) == "Go"


def test_a_stop_text_of_split_characters(loaded):
    for tokenizer in loaded.values():
        ids = tokenizer.encode("ab👍🏽 cd", bos=False)
        pieces, index = stream_pieces(tokenizer, ids, ["🏽 c"])
        assert "".join(pieces) == "ab👍"
        assert tokenizer.decode(ids[: index + 1]).endswith("🏽 c")


def test_nothing_is_held_that_cannot_become_a_stop_text(loaded):
    assert stream_pieces(loaded["bpe_qwen"], letters(loaded, "xabyab"), ["abc"])[0] == [
        "x",
        "",
        "",
        "aby",
        "",
        "",
        "ab",
    ]


@pytest.mark.parametrize("seed", range(200))
def test_random_stop_texts_against_searching_the_whole_text(seed, loaded):
    rng = random.Random(seed)
    tokenizer = loaded["bpe_llama3"]
    alphabet = [tokenizer.codec.token_id(token) for token in ["e", "n", "en", "he", "the"[0], "Ġthe", "ve"]]
    ids = rng.choices(alphabet, k=12)
    stops = ["".join(rng.choices("enht ", k=rng.randint(2, 4))) for _ in range(3)]
    expected, index = tokenizer.decode(ids), None
    for end in range(len(ids)):
        text = tokenizer.decode(ids[: end + 1])
        cuts = [text.find(stop) for stop in stops if stop in text]
        if cuts:
            expected, index = text[: min(cuts)], end
            break
    pieces, stopped_at = stream_pieces(tokenizer, ids, stops)
    assert ("".join(pieces), stopped_at) == (expected, index)


# Stop ids


def test_stop_ids_are_united(tmp_path, loaded):
    for kind, ids in [
        ("bpe_llama3", {313, 316, 317}),
        ("bpe_qwen", {295, 297}),
        ("sentencepiece", {2}),
        ("tiktoken", {355}),
    ]:
        assert stop_token_ids(FIXTURES / kind, loaded[kind]) == ids
    (tmp_path / "config.json").write_text('{"eos_token_id": [5, 6]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert stop_token_ids(tmp_path, loaded["bpe_qwen"]) == {5, 6, 297}
    assert stop_token_ids(tmp_path, None) == {5, 6}


def test_eos_name_from_special_tokens_map_or_the_model_itself(tmp_path):
    path = copy("bpe_llama3", tmp_path / "map") / "tokenizer_config.json"
    path.write_text('{"eos_token": null}')
    assert load_tokenizer(tmp_path / "map").eos_id == 316
    copy("sentencepiece", tmp_path / "model", eos_token=None)
    assert load_tokenizer(tmp_path / "model").eos_id == 2
    copy("tiktoken", tmp_path / "ranks", eos_token=None)
    assert load_tokenizer(tmp_path / "ranks").eos_id == 347


@pytest.mark.parametrize("value", ['"</s>"', "[1, true]", "1.5"])
def test_an_eos_id_that_is_none_is_refused(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(
        ConfigError, match=r"generation_config.json: eos_token_id: .* is not an id, a list of ids or null"
    ):
        stop_token_ids(tmp_path, None)


# Doors


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "name", "data", "message"),
    [
        ("bpe_llama3", "tokenizer.json", b"{", "tokenizer.json: tokenizer: EOF while parsing"),
        (
            "bpe_llama3",
            "tokenizer.json",
            b"version https://git-lfs.github.com/spec/v1\n",
            "tokenizer.json: tokenizer: ",
        ),
        (
            "bpe_llama3",
            "tokenizer_config.json",
            b"{'a': 1}",
            "tokenizer_config.json: JSON: not readable (Expecting property name",
        ),
        (
            "bpe_llama3",
            "tokenizer_config.json",
            b"\xff",
            "tokenizer_config.json: JSON: not readable ('utf-8' codec can't decode",
        ),
        ("bpe_llama3", "special_tokens_map.json", b"[]", "special_tokens_map.json: JSON: expected dict, found list"),
        (
            "sentencepiece",
            "tokenizer.model",
            b"version https://git-lfs",
            "is neither a SentencePiece model nor base64 ranks",
        ),
        ("sentencepiece", "tokenizer.model", b"", "is neither a SentencePiece model nor base64 ranks"),
        (
            "tiktoken",
            "tokenizer.model",
            b"YQ== 0\nY!g== 1\n",
            "tokenizer.model: line 2: is not a base64 token and its rank",
        ),
        ("tiktoken", "tokenizer.model", b"YQ== 0\nYg", "tokenizer.model: line 2: is not a base64 token and its rank"),
        ("tiktoken", "tokenizer.model", b"YQ== 0\nYg== 2\n", "tokenizer.model: ranks: are not 0 to 1, once each"),
    ],
)
def test_damaged_files_are_refused(kind, name, data, message, tmp_path):
    (copy(kind, tmp_path) / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert str(caught.value).endswith("; download the file again")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_tokenizer_model_is_told_by_its_content(kind, tmp_path, loaded):
    shutil.copy(FIXTURES / kind / "tokenizer.model", tmp_path / "tokenizer.model")
    text = "Größe 😀"
    assert load_tokenizer(tmp_path).encode(text) == loaded[kind].encode(text)


def test_a_decoder_we_do_not_know_is_refused(tmp_path):
    path = copy("bpe_llama3", tmp_path) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    for decoder, shown in [(decoders.WordPiece(), '"WordPiece"'), (None, "null")]:
        library.decoder = decoder
        library.save(str(path))
        with pytest.raises(
            ConfigError, match=r"tokenizer.json: decoder: .* is not implemented; use a target"
        ) as caught:
            load_tokenizer(tmp_path)
        assert shown in str(caught.value)


def test_tokens_added_to_a_sentencepiece_model_are_refused(tmp_path):
    """They would be split into letters in silence."""
    added = {"460": {"content": "<|im_start|>", "special": True}}
    copy("sentencepiece", tmp_path / "config", added_tokens_decoder=added)
    (copy("sentencepiece", tmp_path / "file") / "added_tokens.json").write_text('{"<|im_start|>": 460}')
    for name in ("config", "file"):
        with pytest.raises(ConfigError, match=r"tokenizer.model: vocabulary: .* adds to its 460 tokens, .*; save this"):
            load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_no_unicode_is_refused(kind, loaded):
    with pytest.raises(ConfigError, match="prompt: text: character 2 is not valid Unicode; write it in UTF-8"):
        loaded[kind].encode("ab\udce9")
    with pytest.raises(ConfigError, match="prompt: text: character .* is not valid Unicode"):
        loaded[kind].encode_chat([{"role": "user", "content": "ab\udce9"}])
