from dataclasses import dataclass


@dataclass
class Sample:
    tokens: tuple = ()

    def strip(self, n):
        return Sample(self.tokens[:-n])

    @staticmethod
    def join(first, second):
        return Sample(first.tokens + second.tokens)

    @classmethod
    def of(cls, *tokens):
        return cls(tokens)


class Longer(Sample):
    pass
