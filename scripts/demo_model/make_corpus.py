#!/usr/bin/env python3
"""Writes the corpus of the demo model: short English stories and simple questions, one JSON string per line.

Every text comes from the grammar in stories.py and questions.py and from the seed alone: the same arguments give the same file.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random

import questions
import stories


def qa(question: str, answer: str) -> str:
    return f"Q: {question}\nA: {answer}"


def story_document(rng: Random) -> str:
    text = stories.text_of(stories.tell(rng))
    # Varies the prompt as users do: without the initial capital, or without the comma.
    if rng.random() < 0.08:
        text = text[0].lower() + text[1:]
    return text


def story_with_questions(rng: Random) -> str:
    tale = stories.tell(rng)
    facts = rng.sample(tale.facts, min(len(tale.facts), rng.randint(1, 4)))
    return stories.text_of(tale) + "".join("\n" + qa(q, a) for q, a in facts)


def single_question(rng: Random) -> str:
    question, answer = questions.ask(rng)
    form = rng.random()
    if form < 0.7:
        return qa(question, answer)
    if form < 0.85:
        return f"{question}\n{answer}"
    return f"{question} {answer}"


def conversation(rng: Random) -> str:
    turns = rng.choice([2, 3, 4, 5, 6, 30])
    short = [function for function, _ in questions.KINDS if turns < 10 or function is not questions.asked_story]
    return "\n".join(qa(*questions.ask(rng, short)) for _ in range(turns))


DOCUMENTS = [(story_document, 42), (story_with_questions, 10), (single_question, 44), (conversation, 4)]
FUNCTIONS, WEIGHTS = zip(*DOCUMENTS)


def make_shard(shard: int, seed: int, size: int) -> list[str]:
    rng = Random(f"{seed}/{shard}")
    return [rng.choices(FUNCTIONS, WEIGHTS)[0](rng) for _ in range(size)]


def documents(num_documents: int, seed: int, processes: int | None = None) -> list[str]:
    """All documents, in an order that does not depend on the number of processes."""
    size = 2000
    shards = range((num_documents + size - 1) // size)
    with ProcessPoolExecutor(processes) as pool:
        made = pool.map(partial(make_shard, seed=seed, size=size), shards)
        return [text for shard in made for text in shard][:num_documents]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=600_000, help="how many stories and questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--output", default="-", help="file to write, - for standard output (default)")
    arguments = parser.parse_args()
    output = sys.stdout if arguments.output == "-" else open(arguments.output, "w", encoding="utf-8")
    with output:
        for text in documents(arguments.documents, arguments.seed):
            output.write(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
