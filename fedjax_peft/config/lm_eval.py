"""Models and runs as language models of EleutherAI's evaluation harness (the extra ``lm-eval``).

::

    import fedjax_peft as fp
    import lm_eval

    model = fp.lm_eval.of_run("runs/dolly")
    results = lm_eval.simple_evaluate(model, tasks=["hellaswag", "gsm8k"])

The harness makes the prompts and computes the scores. Here are its three questions to a model: the
log-likelihood of a continuation, that of a whole text, and a completion.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.contracts import Params, Sampling
from fedjax_peft.data.roles import fitted
from fedjax_peft.data.templates import apply_chat
from fedjax_peft.data.text import clean
from fedjax_peft.data.tokens import beginning, whole
from fedjax_peft.models.base import Model
from fedjax_peft.models.decoding import check_sampling
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install
from fedjax_peft.tasks.completions import decoded
from fedjax_peft.tasks.generation import complete, end_tokens, likelihoods, text_start

__all__ = ["of_model", "of_run"]


def of_run(run: str | Path, *, client: int | str | None = None, **sizes: int) -> Any:
    """Returns the harness's model of a run on disk; see :func:`of_model`.

    Args:
      run: the run's directory.
      client: the number or name of the client whose model is evaluated; None: the global model.
      **sizes: ``batch_size``, ``max_length`` and ``max_new_tokens`` of :func:`of_model`.

    Raises:
      InputError: lm-eval is not installed, the directory is no run, or its model is no language
        model with a tokenizer.
    """
    from fedjax_peft.config.loading import load_models

    models = load_models(run, None if client is None else [client])
    return of_model(models.model, models.params(models.first), **sizes)


def of_model(
    model: Model,
    params: Params | None = None,
    *,
    batch_size: int = 16,
    max_length: int = 2048,
    max_new_tokens: int = 256,
) -> Any:
    """Returns a model as an ``lm_eval.api.model.LM``, which ``lm_eval.simple_evaluate`` takes.

    Texts begin with the token that the tokenizer puts before every text, if it has one. Stop words
    are looked for in the finished text: the model itself only stops at its end tokens.

    Args:
      model: a model with the head :func:`fedjax_peft.models.heads.causal_lm` and a tokenizer.
      params: its trainable leaves; None: those of the model.
      batch_size: texts in a batch.
      max_length: the most tokens that the model reads; longer texts lose their beginning.
      max_new_tokens: the most tokens of a completion, where the harness's task does not say.

    Raises:
      InputError: lm-eval is not installed, or the model has no tokenizer.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise InputError(
            f"The evaluation harness is not installed: {install('lm-eval')}."
        ) from None
    model.require_tokenizer()
    answers = _Answers(
        model,
        model.trainable if params is None else params,
        batch_size,
        min(max_length, model.longest_text),
        max_new_tokens,
    )

    class FederatedLM(LM):
        """The harness's view of a model."""

        tokenizer_name = type(model.tokenizer).__name__

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return answers.pairs([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return answers.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return answers.completions([request.args for request in requests])

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            [[messages], _] = fitted(model.tokenizer, "chat", [chat_history])
            return str(
                apply_chat(
                    model.tokenizer,
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

    return FederatedLM()


class _Answers(NamedTuple):
    """What a model answers, without the harness's classes."""

    model: Model
    params: Params
    batch_size: int
    max_length: int
    max_new_tokens: int

    def pairs(self, rows: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, whether it is the greedy completion) of each continuation.

        A continuation's tokens are those that the text of both has beyond those of its context.
        White space at the end of a context counts to the continuation.
        """
        tokens = []
        for context, continuation in rows:
            bare = context.rstrip()
            rest = context[len(bare) :] + continuation
            first = self._tokens(bare) if bare else []
            both = self._tokens(bare + rest) if bare else [text_start(self.model), *self._ids(rest)]
            cut = len(first) if bare else 1
            tokens.append(self._fitted(both[:cut], both[cut:]))
        return [(found.total, found.greedy) for found in self._likelihoods(tokens)]

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows that do not overlap.

        The first window begins with the token before a text, every further one with the last token
        of the window before it.
        """
        rows: list[tuple[list[int], list[int]]] = []
        owner = []
        for number, text in enumerate(texts):
            ids = self._ids(text)
            for start in range(0, len(ids), self.max_length):
                window = ids[start : start + self.max_length]
                # A shorter last window sees as many earlier tokens as fit.
                seen = max(start - (self.max_length - len(window)) - 1, 0)
                context = ids[seen:start] if start else [text_start(self.model)]
                rows.append((context, window))
                owner.append(number)
        sums = [0.0] * len(texts)
        for number, found in zip(owner, self._likelihoods(rows), strict=True):
            sums[number] += found.total
        return sums

    def completions(self, rows: Sequence[tuple[str, dict]]) -> list[str]:
        """Returns the completion of each context, cut at its stop words."""
        texts = [""] * len(rows)
        groups: dict[Sampling, list[int]] = {}
        for i, (_, wanted) in enumerate(rows):
            groups.setdefault(self._sampling(wanted), []).append(i)
        for how, members in groups.items():
            room = max(self.max_length - how.max_new_tokens, 1)
            prompts = [self._tokens(rows[i][0])[-room:] for i in members]
            ends = end_tokens(self.model)
            size = self.batch_size
            made = complete(self.model, self.params, prompts, how, ends=ends, batch_size=size)
            for i, text in zip(members, decoded(self.model.tokenizer, made), strict=True):
                texts[i] = _until(text, rows[i][1].get("until") or ())
        return texts

    def _sampling(self, wanted: dict) -> Sampling:
        """Returns the settings of a request; it is greedy unless it asks to be sampled."""
        temperature = wanted.get("temperature")
        drawn = wanted.get("do_sample", bool(temperature))
        new = wanted.get("max_gen_toks", wanted.get("max_new_tokens", self.max_new_tokens))
        return check_sampling(
            Sampling(
                int(new),
                float(1.0 if temperature is None else temperature) if drawn else 0.0,
                float(wanted.get("top_p", 1.0)) if drawn else 1.0,
                int(wanted.get("top_k", 0)) if drawn else 0,
            )
        )

    def _ids(self, text: str) -> list[int]:
        return [*whole(self.model.tokenizer, [clean(text)])[0].ids]

    def _tokens(self, text: str) -> list[int]:
        first = beginning(self.model.tokenizer)
        given = self._ids(text)
        return given if given[: len(first)] == first else [*first, *given]

    def _fitted(self, context: list[int], then: list[int]) -> tuple[list[int], list[int]]:
        """Returns both without the beginning that is too much; the last token is not read."""
        most = self.max_length + 1
        then = then[-(most - 1) :]
        return context[-(most - len(then)) :], then

    def _likelihoods(self, rows: Sequence[tuple[list[int], list[int]]]) -> Any:
        return likelihoods(self.model, self.params, rows, batch_size=self.batch_size)


def _until(text: str, words: str | Iterable[str]) -> str:
    """Returns the text before the first of the stop words."""
    for word in [words] if isinstance(words, str) else words:
        if word:
            text = text.split(word)[0]
    return text
