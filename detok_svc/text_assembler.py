"""The tokens of one sequence, one by one, to settled text, listed ids and shown log-probabilities.

What is settled after some tokens is a function of these tokens alone, however they were grouped:
so a sequence can be taken up again from its ids, and a streamed answer equals one sent whole.
"""

from collections.abc import Mapping

from detok_svc.incremental_decoder import REPLACEMENT, IncrementalDecoder
from detok_svc.stop_strings import StopStrings
from detok_svc.token_logprobs import PendingLogprobs
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2


class TextAssembler:
    """Joins decoder, stop strings and log-probabilities.

    A token is listed when its text is known, so that none is listed beyond a stop string. Text is
    settled when it cannot be part of a stop string. A token's log-probabilities are settled when
    it is known that the token is shown. What is settled is counted with the token that settled it,
    so that an output can be cut between tokens; what no listed token settled belongs to the finish.

    min_tokens: a stop string counts only where it ends after so many tokens.
    endings: tokens that end the sequence, which the decoder does not see, and what each is shown
    as: "" for not at all.
    logprobs: None when none were asked for.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: StopStrings | None,
        *,
        includes_stop: bool,
        min_tokens: int,
        endings: Mapping[int, str],
        logprobs: PendingLogprobs | None,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._endings = endings
        self._logprobs = logprobs
        # Tokens whose text is not known yet.
        self._held: list[tuple[int, detok_pb2.TokenLogprobs | None]] = []
        # Tokens whose text is known.
        self._num_placed = 0
        # Characters of the output so far, and of its settled text, that taken away included.
        self._num_characters = 0
        self.num_settled_characters = 0
        # Settled and not yet taken away.
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[detok_pb2.TokenLogprobs] = []
        # How many characters and entries of these each of the tokens settled.
        self.text_lengths: list[int] = []
        self.logprob_counts: list[int] = []
        # What ended the text, once it has: a stop string, or a token of `endings`.
        self.stop_string = ""
        self.ending: tuple[int, detok_pb2.TokenLogprobs | None] | None = None

    @property
    def num_unsettled(self) -> int:
        """The last tokens, from the first on that is not listed or has logprobs to settle."""
        if self._logprobs is None:
            return len(self._held)
        num_unsettled = len(self._held) + len(self._logprobs)
        if self.ending is not None and (num_unsettled or self._endings[self.ending[0]]):
            num_unsettled += 1
        return num_unsettled

    @property
    def has_unsettled_logprobs(self) -> bool:
        """Whether an end of the sequence now would show log-probabilities of tokens so far."""
        return self._logprobs is not None and bool(self.num_unsettled)

    def add(self, token_id: int, engine_logprobs: engine_pb2.TokenLogprobs | None = None) -> None:
        """Takes the next token. Nothing may be added once the text has ended.

        Tokens that are replayed from a record come without log-probabilities.
        """
        logprobs = None
        if self._logprobs is not None and engine_logprobs is not None:
            # Made at once: the engine's message would keep its whole step in memory.
            logprobs = self._logprobs.message(token_id, engine_logprobs)
        if token_id in self._endings:
            self.ending = token_id, logprobs
            return
        # Whether the token's text begins with what is left of a character that it breaks.
        breaks_character = self._logprobs is not None and self._decoder.has_unfinished_character
        num_characters = self.num_settled_characters
        num_logprobs = len(self.logprobs)
        texts = self._decoder.decode(token_id)
        if len(texts) == 1 and not self._held:
            self._place(token_id, logprobs, texts[0], breaks_character)
        else:
            self._held.append((token_id, logprobs))
            if not self._place_held(texts):
                return
            self._settle_nothing(len(self.token_ids) - len(self.text_lengths) - 1)
        self.text_lengths.append(self.num_settled_characters - num_characters)
        if self._logprobs is not None:
            self.logprob_counts.append(len(self.logprobs) - num_logprobs)

    def end(self) -> None:
        """Settles all there is, as the sequence ends. A stop string may still be found in it."""
        texts, rest = self._decoder.flush()
        self._place_held(texts)
        if rest and not self.stop_string:
            self._push(rest)
        if self.stop_string:
            return
        if self._stops is not None:
            self.texts.append(self._stops.flush())
        if self._logprobs is not None:
            self.logprobs += self._logprobs.settle_all()
        if self.ending is not None:
            self._show_ending(*self.ending)

    def take(self, sequence_id: int) -> detok_pb2.Output:
        """Takes away what has settled since the last call."""
        if len(self.text_lengths) < len(self.token_ids):
            self._settle_nothing(len(self.token_ids) - len(self.text_lengths))
        output = detok_pb2.Output(
            sequence_id=sequence_id,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text_lengths=self.text_lengths,
            logprob_counts=self.logprob_counts,
        )
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.text_lengths, self.logprob_counts = [], []
        return output

    def _place_held(self, texts: list[str]) -> bool:
        """Lists the held tokens once their `texts` are known; says whether the last is listed."""
        if not texts:
            return False
        held, self._held = self._held, []
        for index, ((token_id, logprobs), text) in enumerate(zip(held, texts, strict=True), 1):
            self._place(token_id, logprobs, text, False)
            if self.stop_string and index < len(held):
                return False
        return True

    def _settle_nothing(self, num_tokens: int) -> None:
        """Counts nothing as settled with the next tokens of those that are listed."""
        self.text_lengths += [0] * num_tokens
        if self._logprobs is not None:
            self.logprob_counts += [0] * num_tokens

    def _place(
        self,
        token_id: int,
        logprobs: detok_pb2.TokenLogprobs | None,
        text: str,
        breaks_character: bool,
    ) -> None:
        self.token_ids.append(token_id)
        self._num_placed += 1
        if self._logprobs is not None:
            start = self._num_characters + (breaks_character and text.startswith(REPLACEMENT))
            adds_text = self._decoder.adds_text(token_id)
            self._logprobs.add(start, adds_text, logprobs)
        self._push(text)

    def _push(self, text: str) -> None:
        self._num_characters += len(text)
        if self._stops is not None:
            text, self.stop_string = self._stops.push(
                text, may_end=self._num_placed > self._min_tokens
            )
            if self.stop_string and self._includes_stop:
                text += self.stop_string
        if text:
            self.texts.append(text)
            self.num_settled_characters += len(text)
        if self._logprobs is not None:
            self.logprobs += self._logprobs.settle(self.num_settled_characters)
            if self.stop_string:
                self._logprobs.drop()

    def _show_ending(self, token_id: int, logprobs: detok_pb2.TokenLogprobs | None) -> None:
        self.token_ids.append(token_id)
        if shown := self._endings[token_id]:
            self.texts.append(shown)
            if logprobs is not None:
                self.logprobs.append(logprobs)
