"""Sentences said to a home assistant and their intents, as label<TAB>text: train.tsv and test.tsv.

Out of PyPI's package home-assistant-intents: templates of English sentences for each intent. Ten
sentences are drawn from every template, always the same ones. Names of rooms and devices, and what people
ask to be played or noted, are not in the package; they are filled in from the lists below. A sentence
that has several intents is left out. A share of the sentences is the test part; those that differ only in
case, punctuation or numbers are in the same part.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from training.packages import Parts, is_test, key_of, members

CATALOGUE = r"home_assistant_intents/data/en\.json"
DRAWN = 10  # sentences of a template
TEST_SHARE = 0.15

# What a house has and what its people say: of our own making.
ITEMS = (
    "apples,milk,bread,call the dentist,water the plants,two lemons,a birthday card,coffee,fix the bicycle"
)
FILLED = {
    "area": "kitchen,living room,bedroom,bathroom,hallway,garage,office,attic,cellar,nursery,dining room",
    "name": "ceiling lamp,desk lamp,coffee machine,front door,back door,left curtain,heater,television,fan",
    "floor": "ground,first,second,top,lower,upper",
    "zone": "home,work,school,the gym,the station,the garden",
    "search_query": "some jazz,the white album,morning songs,a piano sonata,rain sounds,the news,old hits",
    "shopping_list_item": ITEMS,
    "todo_list_item": ITEMS,
    "message": "dinner is ready,it is time to go,the taxi is here,good night everyone,come downstairs",
    "timer_name": "pizza,tea,egg,laundry,homework,cake,nap,training",
    "timer_command": "turn off the lights,open the blinds,lock the door,start the vacuum,play music",
}

Choice = TypeVar("Choice")
TOKEN = re.compile(r"[()\[\]|;]|<[^<>]*>|\{[^{}]*\}|[^()\[\]|;<>{}]+")


class Draw:
    """Choices that are a function of a key and of how many were made before."""

    def __init__(self, *key: object) -> None:
        self._key = repr(key)
        self._made = 0

    def of(self, choices: list[Choice]) -> Choice:
        """Return one of the choices."""
        self._made += 1
        digest = hashlib.sha256(f"{self._key} {self._made}".encode()).digest()
        return choices[int.from_bytes(digest[:8], "big") % len(choices)]


class Grammar:
    """Templates of ``(a|b)``, ``[optional]``, ``(any;order)``, ``<rule>``, ``{list}`` and ``{list:slot}``."""

    def __init__(self, catalogue: Mapping[str, Any]) -> None:
        self._rules: Mapping[str, str] = catalogue["expansion_rules"]
        self._lists: Mapping[str, Any] = catalogue["lists"]

    def sentence(self, template: str, draw: Draw) -> str:
        """Return a sentence of a template.

        >>> Grammar({"expansion_rules": {"the": "[the]"}, "lists": {}}).sentence("<the> (a;b)[s]", Draw(1))
        'the b as'
        """
        return " ".join(self._expanded(template, draw).split())

    def _expanded(self, template: str, draw: Draw) -> str:
        return self._alternatives(TOKEN.findall(template), draw)

    def _alternatives(self, tokens: list[str], draw: Draw) -> str:
        """Return one of the alternatives at the head of ``tokens``, up to the bracket that closes them."""
        options, order = [""], [False]
        while tokens and tokens[0] not in ")]":
            token = tokens.pop(0)
            if token in "|;":
                options.append("")
                order.append(token == ";")
            elif token in "([":
                inner = self._alternatives(tokens, draw)
                assert tokens.pop(0) in ")]"
                options[-1] += inner if token == "(" else draw.of([inner, ""])
            else:
                options[-1] += self._filled(token, draw)
        if any(order):  # all of them, in some order
            return " ".join(options.pop(options.index(draw.of(options))) for _ in range(len(options)))
        return draw.of(options)

    def _filled(self, token: str, draw: Draw) -> str:
        if token.startswith("<"):
            return self._expanded(self._rules[token[1:-1]], draw)
        if not token.startswith("{"):
            return token
        name = token[1:-1].partition(":")[0]
        if name in FILLED:
            return draw.of(FILLED[name].split(","))
        found = self._lists[name]
        if numbers := found.get("range"):
            return str(draw.of(list(range(numbers["from"], numbers["to"] + 1, numbers.get("step", 1)))))
        return self._expanded(draw.of(found["values"])["in"], draw)


def intents(package: Path) -> Parts:
    """Return the lines of each file that is made of the package."""
    ((_, content),) = members(package, CATALOGUE)
    catalogue = json.loads(content)
    grammar = Grammar(catalogue)
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for intent, described in catalogue["intents"].items():
        templates = [template for block in described["data"] for template in block["sentences"]]
        for number, template in enumerate(templates):
            for drawn in range(DRAWN):
                labels[grammar.sentence(template, Draw(intent, number, drawn))].add(intent)
    found: dict[str, list[str]] = {"train.tsv": [], "test.tsv": []}
    for sentence, found_in in sorted(labels.items()):
        if len(found_in) == 1:
            part = "test.tsv" if is_test(key_of(sentence), TEST_SHARE) else "train.tsv"
            found[part].append(f"{next(iter(found_in))}\t{sentence}")
    return found
