"""The round: draft K tokens, verify them in one pass of the target, accept, commit - one function of static tensors.

Compiled with fullgraph=True, it is one call a round (on CUDA one graph replay); nothing is read back inside. With K = 0
the same function is plain decoding. Knows drafts only by their methods `prefill` and `propose`; no text, no options.

Shapes: B batch, K drafted tokens, C rows of a prefill chunk, S cache slots, V target vocabulary, n * D width of the aux
states. What holds between rounds, for a sequence x_0 .. x_L of which x_L is *pending* (known, not yet in a cache): the
target's cache holds x_0 .. x_{L-1}; `state` holds the newest `count` tokens, x_L last, and the aux states of the tokens
before them; the draft's cache holds true rows up to those, and the next round's first draft pass writes the rest.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import Transformer
from sampling import draw, law, verify_chain, verify_greedy

PREFILL_CHUNK = 64  # rows: prompts are cut into chunks of this size, so that no length compiles anything new
SMALLEST_CACHE = 512  # tokens: caches come in sizes 512 * 2^n, so that other prompts and budgets compile nothing new
SPARE_SLOTS = 192  # two rounds reach K + 1 tokens each past the end, and the last slot takes padding


def cache_slots(max_seq_len: int) -> int:
    """Slots to allocate for `max_seq_len` tokens."""
    tokens = SMALLEST_CACHE
    while tokens < max_seq_len:
        tokens *= 2
    return tokens + SPARE_SLOTS


class State(nn.Module):
    """What lives on the device between calls. Buffers of a module, because those keep their addresses for CUDA graphs.

    temperature 0 is greedy. The sampling parameters are tensors, so that other values compile nothing."""

    def __init__(
        self,
        batch: int,
        K: int,
        aux_width: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ):
        super().__init__()
        assert 2 * (K + 1) < SPARE_SLOTS, f"K = {K} with {SPARE_SLOTS} spare slots"
        self.K, self.slots, self.greedy = K, slots, temperature == 0
        self.register_buffer("tokens", torch.zeros(batch, K + 1, dtype=torch.int64, device=device))
        self.register_buffer("aux", torch.zeros(batch, K + 1, aux_width, dtype=dtype, device=device))
        self.register_buffer("count", torch.ones(batch, dtype=torch.int64, device=device))
        self.register_buffer("length", torch.zeros(batch, dtype=torch.int64, device=device))  # L above
        # K to draw drafts, K to accept them, one for the token after them; refilled before each call.
        precision = torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64
        self.register_buffer("uniforms", torch.zeros(batch, 2 * K + 1, dtype=precision, device=device))
        # top_p = 1 keeps all there is, where a sum that rounds to 1 early would lose the tail.
        parameters = {"temperature": max(temperature, 1e-30), "top_k": top_k, "top_p": None if top_p == 1 else top_p}
        for name, value in parameters.items():
            self.register_buffer(name, None if value is None else torch.tensor(value, device=device))

    def law(self, logits: Tensor) -> Tensor:
        """logits (..., V) -> probabilities (..., V) under this run's parameters."""
        return law(logits, self.temperature, self.top_k, self.top_p)

    def pick(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """logits (B, V) -> ids (B,) and the law they were drawn from (B, V); greedy: the best, and None."""
        if self.greedy:
            return logits.argmax(-1), None
        probs = self.law(logits)
        return draw(probs, self.uniforms[:, step]), probs


def prefill(
    target: Transformer,
    draft: nn.Module | None,
    state: State,
    tokens: Tensor,
    following: Tensor,
    start: Tensor,
    count: Tensor,
) -> tuple[Tensor, Tensor]:
    """One chunk of a prompt: tokens (B, C) at positions start, start + 1, ...; the first `count` rows are real.

    start, count (B,); following (B, C) is the prompt shifted by one, what the draft pairs with each row's feature.
    Fills caches and `state` as if the prompt ended here. Returns the next token (B, 1) and its logits (B, V)."""
    rows = torch.arange(tokens.size(1), device=tokens.device)
    # Padding goes to the last slot, which no row ever sees.
    positions = torch.where(rows < count[:, None], start[:, None] + rows, state.slots - 1)
    x, aux = target(tokens, positions)
    batch, last = torch.arange(tokens.size(0), device=tokens.device), count - 1
    logits = target.logits(x[batch, last])
    if draft is not None:
        # The last real row would pair with a token that isn't known yet: the first round writes it anew.
        draft.prefill(following, aux, positions)
        state.aux[:, 0] = aux[batch, last]
    token = state.pick(logits, -1)[0].unsqueeze(1)
    state.tokens[:, :1] = token
    state.count.fill_(1)
    state.length.copy_(start + count)
    return token, logits


def speculate(target: Transformer, draft: nn.Module | None, state: State, K: int) -> Tensor:
    """One round. Returns (B, K + 2): how many drafted tokens were accepted, the K drafted ones, the token after them.

    K = 0 decodes one token plainly, with or without a draft."""
    rows = torch.arange(K + 1, device=state.tokens.device)
    last = state.count - 1
    pending = state.tokens.gather(1, last.unsqueeze(1))  # (B, 1)
    drafted = pending[:, :0]
    draft_probs = None
    if K > 0:
        positions = (state.length - state.count)[:, None] + rows  # of the newest tokens' features
        drafted, draft_probs = draft.propose(state.tokens, state.aux, positions, last, K, state.pick)
    x, aux = target(torch.cat((pending, drafted), dim=1), state.length[:, None] + rows)
    logits = target.logits(x)  # (B, K + 1, V)
    if state.greedy:
        num_accepted, token = verify_greedy(drafted, logits.argmax(-1))
    elif K == 0:
        num_accepted, token = torch.zeros_like(last), state.pick(logits[:, 0], -1)[0].unsqueeze(1)
    else:
        u = state.uniforms[:, K : 2 * K]
        num_accepted, next_probs = verify_chain(drafted, draft_probs, state.law(logits), u)
        token = draw(next_probs, state.uniforms[:, -1]).unsqueeze(1)
    # Row num_accepted of the new tokens is `token`; what stands behind it is padding.
    committed = torch.cat((drafted, token), dim=1).scatter(1, num_accepted.unsqueeze(1), token)
    state.tokens[:, : K + 1] = committed
    if K > 0:
        state.aux.copy_(aux)
    state.count.copy_(num_accepted + 1)
    state.length.add_(num_accepted + 1)
    return torch.cat((num_accepted.unsqueeze(1), drafted, token), dim=1)


@dataclass(frozen=True)
class Steps:
    """The calls worth compiling; eager and compiled ones have the same signatures."""

    prefill: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    round: Callable[[], Tensor]
    plain: Callable[[], Tensor]  # the round with K = 0: the baseline


def build_steps(target: Transformer, draft: nn.Module | None, state: State, compiled: bool) -> Steps:
    """Binds models and state to the calls; what is compiled is compiled at its first use."""

    def prefill_chunk(tokens: Tensor, following: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return prefill(target, draft, state, tokens, following, start, count)

    def one_round() -> Tensor:
        return speculate(target, draft, state, state.K)

    def plain_step() -> Tensor:
        return speculate(target, None, state, 0)

    calls = (prefill_chunk, one_round if state.K > 0 else plain_step, plain_step)
    return Steps(*(compile_call(call, state.tokens.is_cuda) for call in calls) if compiled else calls)


def compile_call(call: Callable, is_cuda: bool) -> Callable:
    """`call` as one graph."""
    options = {
        # torch 2.13 and 2.14 free a torch.cat's memory while a piece of it lives on in place. The third drafted token
        # came out wrong then, and the text stayed right (the tests compare proposals).
        "inplace_buffers": False,
        # One graph replay a call, of kernels that were timed against each other for these few rows.
        **({"triton.cudagraphs": True, "max_autotune": True, "coordinate_descent_tuning": True} if is_cuda else {}),
    }
    # torch keeps what it compiled by code object, and no more than a few for one: other pairs and K have their own.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True, dynamic=False, options=options)


@dataclass(frozen=True)
class Round:
    """What one round did; emitted = the accepted tokens and the one after them."""

    proposed: list[int]
    accepted: int
    emitted: list[int]


class Decoder:
    """Runs one sequence through the steps, and knows which prefix of it the caches still hold.

    ahead: a round is queued before the one before it is read, so that the device never waits for the host; an answer's
    last one is then in vain. By default on CUDA, where calls return before they are done."""

    def __init__(self, steps: Steps, state: State, seed: int = 0, ahead: bool | None = None):
        self.steps, self.state, self.seed = steps, state, seed
        self.generator = torch.Generator(state.tokens.device)
        self.ids: list[int] = []  # the sequence so far, the pending token last
        self.sound = 0  # rows of both caches that are valid for `ids`
        self.ahead = state.tokens.is_cuda if ahead is None else ahead
        self.queued: tuple[bool, Callable[[], list[int]]] | None = (
            None  # the round that runs ahead: plain? and its reader
        )
        # On CUDA: where results are copied to, in turn, and what says that they are there.
        self.landings: Iterator | None = None
        if state.tokens.is_cuda:
            pinned = torch.empty(2, state.K + 2, dtype=torch.int64, pin_memory=True)
            self.landings = itertools.cycle([(row, torch.cuda.Event()) for row in pinned])

    def refill(self) -> None:
        """New uniforms for the next call; greedy needs none."""
        if not self.state.greedy:
            self.state.uniforms.uniform_(generator=self.generator)

    @torch.inference_mode()
    def start(self, prompt: list[int], keep: bool = False) -> tuple[int, Tensor]:
        """Prefills the prompt, restarting the seed; returns the first new token and the logits (V,) behind it.

        keep: reuses the cache rows of the longest common prefix with the previous sequence (a conversation)."""
        self.queued = None
        self.generator.manual_seed(self.seed)
        done = self.reusable(prompt) if keep else 0
        self.refill()  # once, whatever the number of chunks: a kept cache must not change what is drawn
        device = self.state.tokens.device
        for begin in range(done, len(prompt), PREFILL_CHUNK):
            rows = prompt[begin : begin + PREFILL_CHUNK]
            following = prompt[begin + 1 : begin + 1 + PREFILL_CHUNK]
            where = torch.tensor([begin], device=device), torch.tensor([len(rows)], device=device)
            token, logits = self.steps.prefill(padded(rows, device), padded(following, device), *where)
        first = token.item()
        self.ids, self.sound = [*prompt, first], len(prompt) - 1
        return first, logits[0].clone()  # a CUDA graph's output lives until the next replay

    def reusable(self, prompt: list[int]) -> int:
        """How many rows of the caches hold for `prompt`. Draft row i holds token i + 1, so one less than agree."""
        common = 0
        while common < min(len(prompt), len(self.ids)) and prompt[common] == self.ids[common]:
            common += 1
        return max(0, min(common - 1, self.sound))

    @torch.inference_mode()
    def round(self, plain: bool = False) -> Round:
        """One round: between 1 and K + 1 new tokens; plain: one step without the draft.

        Running ahead, an answer is all plain or not at all."""
        was_plain, read = self.queued or (plain, self.launch(plain))
        assert was_plain == plain, f"asked for plain={plain}, with plain={was_plain} under way"
        self.queued = (plain, self.launch(plain)) if self.ahead else None
        if not plain or self.state.K == 0:
            # This round's first draft pass covers all tokens so far; a plain step leaves the draft's rows unwritten.
            self.sound = len(self.ids) - 1
        accepted, *drafted, token = read()
        emitted = [*drafted[:accepted], token]
        self.ids += emitted
        return Round(drafted, accepted, emitted)

    def launch(self, plain: bool) -> Callable[[], list[int]]:
        """Queues one call; returns what waits for its result, (K + 2), and reads it."""
        self.refill()
        result = (self.steps.plain if plain else self.steps.round)()[0]
        if self.landings is None:
            return result.tolist
        landing, landed = next(self.landings)
        landing = landing[: result.numel()]
        landing.copy_(result, non_blocking=True)  # before the next replay overwrites it
        landed.record()

        def read() -> list[int]:
            landed.synchronize()
            return landing.tolist()

        return read

    def warm_up(self, plain_too: bool) -> float:
        """Compiles, and records CUDA graphs, by running on a dummy prompt; returns seconds."""
        began = time.perf_counter()
        for plain in (False, True) if plain_too else (False,):
            for _ in range(3):  # a CUDA graph is warmed up, recorded and replayed
                self.start([0])
                self.round(plain)
        self.ids, self.sound, self.queued = [], 0, None
        return time.perf_counter() - began


def padded(ids: list[int], device: torch.device) -> Tensor:
    """(1, C) from at most C ids."""
    return torch.tensor([ids + [0] * (PREFILL_CHUNK - len(ids))], device=device)
