"""Text in, token ids out, and back: what a tokenizer does for the trainer."""

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase


class PromptCodec:
    """A model directory's tokenizer, with or without its chat template."""

    def __init__(self, path: str, *, apply_chat_template: bool) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._chat = apply_chat_template
        if apply_chat_template and not self.tokenizer.chat_template:
            raise ValueError(f"--apply-chat-template: the tokenizer of {path} has no chat template; leave the flag out")
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"--hf-checkpoint {path}: its tokenizer has no end-of-sequence token, so no response would ever end")

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a response."""
        return [self.tokenizer.eos_token_id]

    @property
    def pad_token_id(self) -> int:
        """Fills batches; never read."""
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def encode(self, prompt: str) -> list[int]:
        """Prompt ids, with the chat template's frame if asked for."""
        if self._chat:
            messages = [{"role": "user", "content": prompt}]
            prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(prompt, add_special_tokens=not self._chat)

    def encode_observation(self, text: str) -> list[int]:
        """Ids of what the policy is told after its turn, with the chat template's frame if asked for.

        Raises:
            ValueError: a template that rewrites earlier messages when one is added, or that ends an answer with another token
                than the policy does.
        """
        if self._chat:
            conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            said = self.tokenizer.apply_chat_template(conversation, tokenize=False)
            told = [*conversation, {"role": "user", "content": text}]
            whole = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
            answer, _, after_answer = said.rpartition(self.tokenizer.eos_token)
            if not whole.startswith(said) or "!" not in answer:
                raise ValueError(
                    "--max-turns with --apply-chat-template: this template rewrites earlier messages, or does not end an answer "
                    f"with {self.tokenizer.eos_token!r}; leave --apply-chat-template out"
                )
            # the policy has sampled the end-of-sequence token itself; what the template writes after it is still to come
            text = after_answer + whole.removeprefix(said)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Response text without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
