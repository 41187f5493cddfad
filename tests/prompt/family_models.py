"""A family's template, tokenizer and rules, as a gateway has them of a checkpoint."""

from __future__ import annotations

from goldens.tokenizers_of import BOS, EOS, complete
from pixelgate.processor import load
from pixelgate.prompt.expand import build
from pixelgate.prompt.rules import Rules
from pixelgate.prompt.template import ChatTemplate
from pixelgate.prompt.tokens import open_tokenizer


class Model:
    """What a gateway has of a checkpoint."""

    def __init__(self, family, folder):
        self.processor = load(complete(family, folder))
        self.tokenizer = open_tokenizer(folder / "tokenizer.json")
        variables = {"eos_token": EOS.get(family, "</s>"), "bos_token": BOS.get(family)}
        self.template = ChatTemplate(
            (folder / "chat_template.jinja").read_text("utf-8"), {k: v for k, v in variables.items() if v}
        )

    def expansions(self, case):
        """The ids of each picture, which are all of one sample."""
        family, sizes, of = self.processor.family, case.get("sizes", ()), self.tokenizer.special_ids
        plans = [self.processor.plan(height=h, width=w, images_in_sample=len(sizes)) for h, w in sizes]
        return [[i for token, count in family.expansion(plan) for i in [of[token]] * count] for plan in plans]

    def prompt(self, case, template=None, expansions=None, **settings):
        family = self.processor.family
        rules = Rules(family.placeholder, family.in_text, family.image_tokens, family.separate_texts, **settings)
        return build(
            case["messages"],
            template or self.template,
            self.tokenizer,
            rules,
            expansions=self.expansions(case) if expansions is None else expansions,
            add_generation_prompt=case.get("add_generation_prompt", True),
            continue_final_message=case.get("continue_final_message", False),
            tools=case.get("tools"),
        )

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def specials(self, ids):
        known = set(self.tokenizer.special_ids.values())
        return [id_ for id_ in ids if id_ in known]
