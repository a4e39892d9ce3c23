"""Text to token ids: raw text as it is, and prompts of which some characters are stand-ins."""

import secrets
from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Encoding, Tokenizer, models

from protos.wire.errors import StartupError
from tokenizer_svc.control_tokens import control_tokens
from tokenizer_svc.rendered_prompt import RenderedPrompt


def _accept(num_tokens: int) -> None:
    """No limit."""


class TextEncoder:
    """Encodes with one tokenizer. Safe to call from several threads; the GIL is released.

    A prompt in which a user typed control tokens is encoded in two steps. First the template's own
    control tokens are found, which the user's cannot be taken for while they hold stand-ins, and
    each is replaced by an *alias*: a text that nobody can type, since it holds a secret. Then
    the stand-ins give way to their characters, and a twin of the tokenizer that knows the aliases,
    but not the control tokens' own texts, encodes the whole in one piece. So the text around
    borders is cut and merged exactly as always.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        secret = secrets.token_hex(8)
        self._aliases: dict[str, str] = {}
        self._finder = Tokenizer(models.BPE())
        # The model is shared, not copied.
        self._twin = Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(self._twin, part, value)
        control = control_tokens(tokenizer)
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        for token_id, token in added:
            if token_id in control:
                # Private-use characters too, but of a plane that stand-ins are not taken from.
                self._aliases[token.content] = f"\U000f0000{secret}-{token_id}\U000f0001"
        self._finder.add_tokens([_plain(token) for _, token in added])
        self._twin.add_tokens([self._twin_token(token) for _, token in added])
        self._ids = self._twin_ids(added)

    def encode_text(
        self, text: str, add_special_tokens: bool, check: Callable[[int], None] = _accept
    ) -> list[int]:
        """Ids of raw text, control tokens in it parsed.

        `check` is given their number, and may raise, before the list of them is made: that holds
        the interpreter lock.
        """
        encoding = self._encode(self._tokenizer, text, add_special_tokens)
        check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def encode_prompt(
        self, prompt: RenderedPrompt, check: Callable[[int], None] = _accept
    ) -> list[int]:
        """Ids of a rendered chat: control tokens are the template's only. Nothing is added."""
        if not any(stand_in in prompt.text for stand_in in prompt.stand_ins):
            return self.encode_text(prompt.text, False, check)
        text = self._with_aliases(prompt.text)
        # One after another: str.translate holds the interpreter lock for a look-up per character.
        for stand_in, original in prompt.stand_ins.items():
            text = text.replace(stand_in, original)
        encoding = self._encode(self._twin, text, False)
        check(len(encoding))
        return [self._ids.get(i, i) for i in encoding.ids]

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
        # The batch call leaves out the offsets of each token, half of the time and memory.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _with_aliases(self, text: str) -> str:
        """`text` with each control token in it replaced by its alias.

        The finder's model knows no token, so its ids are those of the added tokens alone, found by
        the library's own search with its rules (leftmost, then longest).
        """
        pieces = []
        end = 0
        # The batch call, since the library lets go of the interpreter lock in no other.
        [found] = self._finder.encode_batch([text], add_special_tokens=False)
        for content, (start, stop) in zip(found.tokens, found.offsets, strict=True):
            pieces += [text[end:start], self._aliases.get(content, content)]
            end = stop
        return "".join([*pieces, text[end:]])

    def _twin_token(self, token: AddedToken) -> AddedToken:
        alias = self._aliases.get(token.content)
        if alias is None:
            return token
        return AddedToken(
            alias,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=False,
        )

    def _twin_ids(self, added: list[tuple[int, AddedToken]]) -> Mapping[int, int]:
        """The real id for each of the twin's ids that differs.

        Raises StartupError when a new id of the twin is also an id of the model.
        """
        ids = {}
        for token_id, token in added:
            text = self._aliases.get(token.content, token.content)
            twin_id = self._twin.token_to_id(text)
            if twin_id is None:
                raise StartupError(f"the tokenizer's token {token.content!r} cannot be copied")
            if twin_id == token_id:
                continue
            if self._twin.model.id_to_token(twin_id) is not None:
                raise StartupError("the tokenizer's vocabulary has holes, which is not supported")
            ids[twin_id] = token_id
        return ids


def _plain(token: AddedToken) -> AddedToken:
    """The token's text alone, without the white space that its flags would take along."""
    return AddedToken(token.content, single_word=token.single_word, normalized=False)
