"""Vocabularies, grammars and their followers, without an engine."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.chat import Chat
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Request, Sampling, Stamp
from quartet_inference.sampler import Sampler
from quartet_inference.structure import following, grammar
from quartet_inference.structure.following import StructureError, Structures
from quartet_inference.structure.vocabulary import _bytes_of, bytes_of_text, ll_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .following import allowed, end_of, follow
from .random_models import byte_tokenizer

TEXTS = [
    "naïve façade, 日本語 🙂",
    '{"a": [1, 2.5], "b": null}\n\t',
    "<think>\n</think> it's 3°C",
    "\r\n \u00a0x",
]


def byte_level() -> Any:
    """With merges, as GPT-2's, Qwen's and Llama 3's are made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def byte_fallback() -> Any:
    """As Llama 2's, Mistral's and Gemma's are made."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "日"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "a")], unk_token="<unk>",
        byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def stripping() -> Any:
    """As Llama 2's decodes: a text, and so a token alone, loses the space that it begins with."""
    tokenizer = byte_fallback()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def fast(backend: Any, end: str) -> Any:
    backend.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_those_of_the_texts(make: Any) -> None:
    """vocabulary.py 1."""
    tokenizer = fast(make(), "</s>")
    tokens, special = _bytes_of(tokenizer.backend_tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokens[token] for token in ids) == text.encode()
    end, thinks = tokenizer.convert_tokens_to_ids(["</s>", "<think>"])
    assert end in special and thinks not in special and tokens[thinks] == b"<think>"


@pytest.mark.parametrize("make", [byte_level, byte_fallback, stripping])
def test_bytes_of_halves_of_characters_are_told(make: Any) -> None:
    """vocabulary.py 1: joined they are the text, whatever its tokens are alone."""
    tokenizer = fast(make(), "</s>")
    told = bytes_of_text(tokenizer)
    text = "é語🙂𝛑 hello world"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = tokenizer.batch_decode([[token] for token in ids])
    assert any("\ufffd" in text for text in texts)
    joined = b"".join(told(token, text) for token, text in zip(ids, texts, strict=True))
    assert joined.decode() == text


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_texts_pass_and_end_tokens_are_never_text(make: Any) -> None:
    """vocabulary.py 2: also one that the tokenizer takes for text, and one behind all that it knows."""
    tokenizer = fast(make(), "</s>")
    end, thinks = tokenizer.convert_tokens_to_ids(["</s>", "<think>"])
    ends = {end, thinks, len(tokenizer) + 5}
    structures = Structures(lambda: ll_tokenizer(tokenizer, ends), ends)
    string = grammar.grammar("start: @answer", {"answer": grammar.of_schema({"type": "string"})})
    for text in TEXTS:
        ids = tokenizer.encode(json.dumps(text, ensure_ascii=False), add_special_tokens=False)
        ids = [token for token in ids if token != thinks] if "<think>" in text else ids
        assert not end_of(follow(structures, string, ids[:-1]), ends)
        follower = follow(structures, string, ids)
        assert end_of(follower, ends)
        assert follower is not None and allowed(follower) == ends
        follower.accept(end)
        assert not follower.stuck


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    """vocabulary.py 3."""
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    for tokenizer, ends in ((fast(words, "[E]"), {3}), (byte_tokenizer(), set()), (object(), {1})):
        structures = Structures(lambda it=tokenizer, ends=ends: ll_tokenizer(it, ends), ends)
        with pytest.raises(QuartetError) as refused:
            structures.compile(grammar.grammar('start: "a"', {}))
        assert refused.value.reason == "NOT_IMPLEMENTED" and refused.value.metadata["field"] == "structure"


@pytest.fixture(scope="module")
def structures() -> Structures:
    return Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})


def letters(text: str) -> list[int]:
    return [int(token) for token in byte_tokenizer().encode(text)]


def regex(pattern: str) -> str:
    return grammar.grammar("start: @answer", {"answer": {"lark_grammar": f"start: /{pattern}/"}})


def test_completions_follow_by_themselves(structures: Structures) -> None:
    """following.py 1, 2."""
    pattern = regex("ab|cd")
    one, other = structures.follower(pattern), structures.follower(pattern)
    one.accept(*letters("a"))
    assert allowed(one) == set(letters("b")) and allowed(other) == set(letters("ac"))
    assert allowed(structures.follower(pattern, letters("c"))) == set(letters("d"))


def test_a_follower_that_is_stuck_stays_so(structures: Structures) -> None:
    """following.py 3."""
    follower = structures.follower(regex("ab"), letters("x"))
    assert follower.stuck and allowed(follower) == set()
    follower.accept(*letters("a"))
    assert follower.stuck


def test_an_end_token_ends_what_is_complete_and_nothing_else(structures: Structures) -> None:
    """following.py 4: and what comes behind it is not looked at."""
    for tokens, stuck in (("a", True), ("ab", False), ("abc", False), ("", True)):
        follower = structures.follower(regex("abc?"), [*letters(tokens), 258])
        assert follower.stuck is stuck
        follower.accept(*letters("x"))
        follower.accept(258)
        assert follower.stuck is stuck and allowed(follower) == (set() if stuck else {258})


def test_the_oldest_grammars_are_let_go_and_compiled_again(structures: Structures) -> None:
    """following.py 1: by what they weigh, and those that were used last stay."""
    structures = Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})
    heavy = following.MAX_COMPILED_BYTES // 4
    first, second, *others = [regex(f"a{index}") for index in range(6)]
    for one in (first, second, *others[:2]):
        structures.compile(one, heavy)
    assert structures.find(first) is not None
    structures.compile(others[2], 0)
    assert structures.find(second) is None and structures.find(first) is not None
    assert structures.kept_bytes == 3 * heavy + following.LEAST_BYTES + 48 * len(others[2])
    assert allowed(structures.follower(second)) == set(letters("a")), "compiled again"


def test_many_light_grammars_are_kept_and_few_of_unknown_weight() -> None:
    """following.py 1: what no trial has weighed, as in a worker, is taken for heavy."""
    structures = Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})
    light = [regex(f"a{index}") for index in range(200)]
    for one in light:
        structures.compile(one, 0)
    assert all(structures.find(one) for one in light)
    for index in range(70):
        structures.follower(regex(f"b{index}"))
    found = [structures.find(regex(f"b{index}")) is not None for index in range(70)]
    assert found == [False] * 6 + [True] * 64
    assert not any(structures.find(one) for one in light)
    assert structures.kept_bytes == following.MAX_COMPILED_BYTES
    long = "|".join(f"c{index}" for index in range(2000))
    assert structures.compile(regex(long), 0).weight_bytes > 48 * len(long)


def test_one_grammar_is_compiled_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made, matcher = [], following.LLMatcher

    def slowly(*args: Any, **more: Any) -> Any:
        made.append(1)
        time.sleep(0.05)
        return matcher(*args, **more)

    monkeypatch.setattr(following, "LLMatcher", slowly)
    structures = Structures(lambda: ll_tokenizer(byte_tokenizer(), {258}), {258})
    threads = [threading.Thread(target=structures.compile, args=(regex("ab"),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_what_cannot_be_compiled_is_refused_each_time(structures: Structures) -> None:
    for _ in range(2):
        with pytest.raises(StructureError, match="unclosed"):
            structures.compile(regex("a(b"))
        assert structures.find(regex("a(b")) is None


def row(structures: Structures | None, pattern: str = "", seed: int = 1, **sampling: Any) -> RunningSequence:
    request = Request((1,), Sampling(max_tokens=50, grammar=pattern, **sampling))
    sequence = RunningSequence(request, 0, seed, frozenset(), None, None, None, torch.device("cpu"))
    if structures is not None:
        sequence.follower = structures.follower(pattern)
    return sequence


def test_free_rows_do_not_see_the_others(structures: Structures) -> None:
    """sampler.py 4: to the bit, and without a mask where no row has a structure."""
    logits = torch.randn(4, 288, generator=torch.Generator().manual_seed(3)) * 3
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.5}]
    free = [row(None, seed=seed, **kind) for seed, kind in enumerate(kinds)]
    alone = Sampler(free)
    assert alone._restriction.rows == [] and alone._bound is None
    wanted = alone.draw(logits[:3])
    have = Sampler([*free, row(structures, regex("[ab]c"))]).draw(logits)
    assert torch.equal(have[0][:3], wanted[0]) and torch.equal(have[1][:3], wanted[1])
    assert have[0][3].item() in letters("ab")
    assert have[1][3] == torch.log_softmax(logits[3], -1)[have[0][3]], "before the restriction"


def test_bound_and_truncated_rows_are_each_what_they_are_alone(structures: Structures) -> None:
    """restriction.py 1; sampler.py 3, 4: whichever of the others are bound, by what, truncated or both."""
    logits = torch.randn(18, 288, generator=torch.Generator().manual_seed(5)) * 3
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"temperature": 0.0, "top_p": 0.5}, {"min_p": 0.3}]
    rows = [
        row(
            structures if seed % 3 else None, regex("[a-h][x-z]") if seed % 3 else "", seed, **kinds[seed % 4]
        )
        for seed in range(12)
    ]
    held = {"stop_token_ids": frozenset(range(0, 288, 2)), "min_tokens": 2}
    for place, seed in enumerate(range(12, 18)):
        rows.insert(3 * place, row(None, seed=seed, **held, **kinds[seed % 4]))
    restricted = [one for one in rows if one.follower is not None or one.sampling.min_tokens]
    for chosen in (rows, restricted, [one for one in rows if one.follower is not None]):
        at = [rows.index(one) for one in chosen]
        tokens, logprobs, _ = Sampler(chosen).draw(logits[at])
        for place, one in zip(at, chosen, strict=True):
            alone = Sampler([one]).draw(logits[place : place + 1])
            here = at.index(place)
            assert (tokens[here], logprobs[here]) == (alone[0][0], alone[1][0])
            if one.sampling.min_tokens:
                assert tokens[here] % 2 == 1


def test_a_row_is_held_back_until_it_has_its_tokens_and_then_pays_nothing() -> None:
    """restriction.py 2; sampler.py 3, 4: however improbable what is left is, and in one list of rows."""
    logits = torch.full((2, 6), -200.0)
    logits[:, 2] = 50.0  # what ends it
    rows = [row(None, seed=1, stop_token_ids=frozenset({2, 5}), min_tokens=2), row(None, seed=2)]
    sampler = Sampler(rows)
    for _ in range(2):
        tokens, logprobs, _ = sampler.draw(logits)
        assert tokens[0] in (0, 1, 3, 4) and tokens[1] == 2
        assert logprobs[0] == pytest.approx(-250.0), "of the free distribution"
        assert sampler._restriction.rows == [0]
        for one, token in zip(rows, tokens.tolist(), strict=True):
            one.accept(token, 0.0, Stamp(0))
    assert sampler.draw(logits)[0].tolist() == [2, 2]
    assert sampler._restriction.rows == [] and sampler._bound is None


def test_one_bound_row_copies_no_other(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    """sampler.py 4."""
    copied: list[tuple[int, ...]] = []
    clone, fill = torch.Tensor.clone, torch.Tensor.masked_fill

    def cloned(rows: torch.Tensor, *more: Any, **most: Any) -> torch.Tensor:
        copied.append(tuple(rows.shape))
        return clone(rows, *more, **most)

    def filled(rows: torch.Tensor, *more: Any) -> torch.Tensor:
        copied.append(tuple(rows.shape))
        return fill(rows, *more)

    rows = [*(row(None, seed=seed) for seed in range(7)), row(structures, regex("ab"), temperature=0.0)]
    sampler, logits = Sampler(rows), torch.zeros(8, 288)
    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(torch.Tensor, "masked_fill", filled)
    assert sampler.draw(logits)[0][7].item() == letters("a")[0]
    assert copied == [(1, 288)]


def test_what_is_allowed_is_drawn_however_improbable(structures: Structures) -> None:
    """sampler.py 3: all of it is nothing in float32; padding beyond the tokenizer is the likeliest."""
    logits = torch.full((1, 300), -400.0)
    logits[0, 290] = 100.0
    a, b, c = letters("abc")
    logits[0, a], logits[0, b] = -300.0, -301.0
    drawn = [Sampler([row(structures, regex("[abc]"), seed)]).draw(logits)[0].item() for seed in range(300)]
    assert set(drawn) == {a, b} and 50 < drawn.count(b) < 110
    for kind in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}):
        for seed in range(20):
            assert Sampler([row(structures, regex("[abc]"), seed, **kind)]).draw(logits)[0].item() == a
    assert Sampler([row(structures, regex("c"), temperature=0.0)]).draw(logits)[0].item() == c


def test_a_stuck_row_has_no_logprob_and_disturbs_nobody(structures: Structures) -> None:
    """sampler.py 6, masks.py 3."""
    logits = torch.randn(3, 288, generator=torch.Generator().manual_seed(3))
    stuck, fine = row(structures, regex("ab")), row(structures, regex("ab"))
    assert stuck.follower is not None
    stuck.follower.accept(*letters("z"))
    rows = [fine, stuck, row(None)]
    sampler = Sampler(rows)
    tokens, logprobs, _ = sampler.draw(logits)
    assert sampler.stuck == [1] and logprobs[1] == torch.inf
    assert torch.isfinite(logprobs[[0, 2]]).all() and tokens[0].item() == letters("a")[0]


def test_masks_do_not_depend_on_how_they_are_unpacked(structures: Structures) -> None:
    """masks.py 1, as a device does it."""
    rows = [row(structures, regex(pattern)) for pattern in ("[a-z]+", ".", "x|[0-9]")]
    masks = Sampler(rows)._restriction._masks
    assert masks is not None
    here, _ = masks.forbidden(300)
    masks._bits, masks._device = torch.arange(8, dtype=torch.uint8), torch.device("cpu")
    there, _ = masks.forbidden(300)
    assert torch.equal(here, there) and (~here).sum(-1).tolist()[2] == 11
    assert [set(np.flatnonzero(~one)) for one in here.numpy()] == [
        allowed(one.follower) for one in rows if one.follower is not None
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_row_has_its_own_mask_of_as_many_tokens_as_the_model_has(
    structures: Structures, count: int
) -> None:
    """masks.py 1, 2: fewer than its words have bits, as many, one more."""
    rows = [row(structures, regex(pattern)) for pattern in ("a", "b", "[bc]")][:count]
    masks = Sampler(rows)._restriction._masks
    assert masks is not None
    for vocabulary in (260, 288, 289, 320):
        forbidden, stuck = masks.forbidden(vocabulary)
        assert forbidden.shape == (count, vocabulary) and not stuck
        assert [np.flatnonzero(~one).tolist() for one in forbidden.numpy()] == [
            letters(text) for text in ("a", "b", "bc")
        ][:count]


def test_the_demos_own_model_is_served(tmp_path: Path) -> None:
    """`quartet model tiny`: added tokens are text, its vocabulary is padded."""
    from quartet.cli.tiny.files import write_model_files

    write_model_files(tmp_path)
    chat = Chat(tmp_path)
    for pattern, text in (("<answer>[0-9]<\\/answer>", "<answer>3</answer>"), ("system", "system")):
        chat.structures.compile(regex(pattern))
        ids = chat.encode(text)
        assert len(ids) < len(text), "by tokens of several letters"
        assert end_of(follow(chat.structures, regex(pattern), ids), chat.end_tokens)


def test_json_is_on_one_line_unless_its_schema_says_otherwise(structures: Structures) -> None:
    """grammar.py 3."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    texts = ['{"a": [1, 2]}', '{"a":[1,2]}', '{"a":  [1]}', '{"a":[1 ,2]}', '{\n  "a": []\n}', '{"a":\n[]}']
    flexible = {**schema, "x-guidance": {"whitespace_flexible": True}}
    for one, wanted in ((schema, [True] * 2 + [False] * 4), (flexible, [True] * 6)):
        json_of = grammar.grammar("start: @answer", {"answer": grammar.of_schema(one)})
        assert [end_of(follow(structures, json_of, letters(text)), {258}) for text in texts] == wanted


def test_one_of_is_any_of(structures: Structures) -> None:
    """grammar.py 3: as a union of pydantic's has it."""
    kinds = [
        {
            "type": "object",
            "properties": {"k": {"const": k}},
            "required": ["k"],
            "additionalProperties": False,
        }
        for k in ("x", "y")
    ]
    union = grammar.of_schema({"oneOf": kinds, "discriminator": {"propertyName": "k"}})
    json_of = grammar.grammar("start: @answer", {"answer": union})
    for text, wanted in (('{"k": "x"}', True), ('{"k": "y"}', True), ('{"k": "z"}', False)):
        assert end_of(follow(structures, json_of, letters(text)), {258}) is wanted
