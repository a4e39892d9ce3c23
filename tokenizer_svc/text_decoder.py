"""Token ids back to text, all at once; streams are decoded by detok_svc."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from protos.wire.errors import InvalidRequest


class TextDecoder:
    """Decodes with one tokenizer. Safe to call from several threads; the GIL is released."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text; raises InvalidRequest for an id that the tokenizer does not have.

        The library itself leaves such ids out without a word.
        """
        for token_id in set(token_ids):
            if self._tokenizer.id_to_token(token_id) is None:
                raise InvalidRequest(
                    f"The token id {token_id} is not in this model's vocabulary.", param="tokens"
                )
        # The batch call, since the library lets go of the interpreter lock in no other.
        [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary writes it, such as `Ġthe`."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
