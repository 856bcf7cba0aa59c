"""The vocabulary of all tasks: one token for each character."""

from string import ascii_letters, digits

from kerple.base.errors import UserError, require

PAD, BEGIN, END = "·", "«", "»"
LETTERS = ascii_letters
CHARACTERS = PAD + BEGIN + END + digits + LETTERS + "=>+-*^%,;:?.[]() "
IDS = {character: i for i, character in enumerate(CHARACTERS)}
PAD_ID, BEGIN_ID, END_ID = IDS[PAD], IDS[BEGIN], IDS[END]


def characters_to_ids(text: str) -> list[int]:
    """Return the token ids of a text, one per character.

    Raises:
        UserError: A character is not in `CHARACTERS`.
    """
    try:
        return [IDS[character] for character in text]
    except KeyError as unknown:
        raise UserError(f"text: got the character {unknown} in {text!r}, expected {CHARACTERS[3:]!r}") from None


def ids_to_characters(tokens: list[int]) -> str:
    """Return the text of token ids, without padding.

    Raises:
        UserError: An id is not in the vocabulary, such as an id that a model with more ids has generated.
    """
    for t in tokens:
        require(0 <= t < len(CHARACTERS), "tokens", f"the id {t}", f"0 to {len(CHARACTERS) - 1}")
    return "".join(CHARACTERS[t] for t in tokens if t != PAD_ID)
