"""Simple questions with their answers, each in several wordings. Some combinations are kept for testing only."""

from random import Random
from zlib import crc32

import stories
import words as w
from stories import article


def held_out(*parts: object) -> bool:
    """Whether a combination is kept out of the corpus, as one in ten is, to test generalization instead of memorization."""
    return crc32(" ".join(map(str, parts)).encode()) % 10 == 0


def _number(rng: Random, value: int, in_words: bool) -> str:
    return w.NUMBERS[value] if in_words and value < len(w.NUMBERS) else str(value)


def addition(rng: Random) -> tuple[str, str, bool]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    in_words = a + b <= 20 and rng.random() < 0.4
    x, y, z = (_number(rng, v, in_words) for v in (a, b, a + b))
    if rng.random() < 0.1:
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", held_out("add", a, b)
    question = rng.choice([f"What is {x} plus {y}?", f"What is {x} plus {y}?", f"How much is {x} plus {y}?", f"Add {x} and {y}."])
    return question, f"{x} plus {y} is {z}.".capitalize(), held_out("add", a, b)


def subtraction(rng: Random) -> tuple[str, str, bool]:
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    in_words = rng.random() < 0.4
    x, y, z = (_number(rng, v, in_words) for v in (a, b, a - b))
    question = rng.choice([f"What is {x} minus {y}?", f"How much is {x} minus {y}?", f"Take {y} away from {x}."])
    return question, f"{x} minus {y} is {z}.".capitalize(), held_out("subtract", a, b)


def opposite(rng: Random) -> tuple[str, str, bool]:
    a, b = rng.choice(w.OPPOSITES)
    if rng.random() < 0.5 and (b, a) not in (("light", "heavy"), ("old", "young"), ("short", "tall")):
        a, b = b, a
    known = dict(w.OPPOSITES)
    b = known.get(a, b)
    question = rng.choice([f"What is the opposite of {a}?", f"What is the opposite of {a}?", f"Tell me the opposite of {a}.", f"Give the opposite of {a}."])
    return question, f"The opposite of {a} is {b}.", False


def capital(rng: Random) -> tuple[str, str, bool]:
    country, city = rng.choice(w.CAPITALS)
    if rng.random() < 0.25:
        return f"Which country has the capital {city}?", f"{city} is the capital of {country}.", False
    question = rng.choice([f"What is the capital of {country}?", f"Which city is the capital of {country}?", f"Name the capital of {country}.", f"What's the capital of {country}?"])
    return question, f"The capital of {country} is {city}.", False


def sound(rng: Random) -> tuple[str, str, bool]:
    animal, noise = rng.choice(w.SOUNDS)
    question = rng.choice([f"What sound does {article(animal)} make?", f"What does {article(animal)} say?", f"Which sound does {article(animal)} make?"])
    return question, f"{article(animal).capitalize()} says {noise}.", False


def baby(rng: Random) -> tuple[str, str, bool]:
    animal, young = rng.choice(w.BABIES)
    question = rng.choice([f"What is a baby {animal} called?", f"What do you call a baby {animal}?", f"What is the name of a young {animal}?"])
    return question, f"A baby {animal} is called {article(young)}.", False


def color_of(rng: Random) -> tuple[str, str, bool]:
    thing, color = rng.choice(w.FACT_COLORS)
    question = rng.choice([f"What color is {thing}?", f"Which color does {thing} have?", f"What is the color of {thing}?"])
    return question, f"{thing[0].upper()}{thing[1:]} is {color}.", False


def home(rng: Random) -> tuple[str, str, bool]:
    who, where = rng.choice(w.HOMES)
    return rng.choice([f"Where does {article(who)} live?", f"Where do you find {article(who)}?"]), f"{article(who).capitalize()} lives {where}.", False


def bigger(rng: Random) -> tuple[str, str, bool]:
    i, j = sorted(rng.sample(range(len(w.SIZES)), 2))
    small, large = w.SIZES[i], w.SIZES[j]
    first, second = rng.sample([small, large], 2)
    held = held_out("size", small, large)
    if rng.random() < 0.6:
        question = rng.choice([f"Which is bigger, {article(first)} or {article(second)}?", f"What is bigger, {article(first)} or {article(second)}?", f"Which animal is bigger, {article(first)} or {article(second)}?"])
        return question, f"{article(large).capitalize()} is bigger than {article(small)}.", held
    question = rng.choice([f"Which is smaller, {article(first)} or {article(second)}?", f"What is smaller, {article(first)} or {article(second)}?"])
    return question, f"{article(small).capitalize()} is smaller than {article(large)}.", held


def is_a(rng: Random) -> tuple[str, str, bool]:
    kind, members = rng.choice(w.KINDS)
    if rng.random() < 0.5:
        member = rng.choice(members)
        return f"Is {member} {article(kind)}?", f"Yes, {member} is {article(kind)}.", held_out("is", member, kind)
    other, others = rng.choice([pair for pair in w.KINDS if pair[0] != kind and {pair[0], kind} not in ({"animal", "bird"}, {"color", "fruit"})])
    member = rng.choice(others)
    return f"Is {member} {article(kind)}?", f"No, {member} is {article(other)}.", held_out("is", member, kind)


def after(rng: Random) -> tuple[str, str, bool]:
    which = rng.random()
    if which < 0.35:
        number = rng.randint(0, 99)
        step, word = rng.choice([(1, "after"), (-1, "before")]) if number else (1, "after")
        return f"What number comes {word} {number}?", f"{number + step} comes {word} {number}.", held_out("after", number)
    names, label = (w.DAYS, "day") if which < 0.7 else (w.MONTHS, "month")
    index = rng.randrange(len(names))
    step, word = rng.choice([(1, "after"), (-1, "before")])
    return f"Which {label} comes {word} {names[index]}?", f"{names[(index + step) % len(names)]} comes {word} {names[index]}.", False


def plural(rng: Random) -> tuple[str, str, bool]:
    one, many = rng.choice(w.PLURALS)
    return rng.choice([f"What is the plural of {one}?", f"What is the plural of \"{one}\"?"]), f"The plural of {one} is {many}.", False


def legs(rng: Random) -> tuple[str, str, bool]:
    who, number = rng.choice(w.LEGS)
    return f"How many legs does {article(who)} have?", f"{article(who).capitalize()} has {number} legs.", False


def use(rng: Random) -> tuple[str, str, bool]:
    thing, purpose = rng.choice(w.USES)
    question = rng.choice([f"What do you use {thing} for?", f"What is the use of {thing}?"])
    return question, f"You use {thing} to {purpose}.", False


def plain(rng: Random) -> tuple[str, str, bool]:
    return (*rng.choice(w.PLAIN_FACTS), False)


def about(rng: Random) -> tuple[str, str, bool]:
    return (*rng.choice(w.ABOUT), False)


def unknown(rng: Random) -> tuple[str, str, bool]:
    topic = rng.choice(w.UNKNOWN_TOPICS)
    question = rng.choice(w.UNKNOWN_ASKS).format(topic)
    return question, rng.choice(w.UNKNOWN_ANSWERS), held_out("unknown", topic, question)


def who_has(rng: Random) -> tuple[str, str, bool]:
    """A question about the two or three sentences before it."""
    people = [stories.some_name(rng, [name]) for name in rng.sample(w.GIRLS + w.BOYS, rng.choice([2, 2, 3]))]
    things = rng.sample(w.THINGS, len(people))
    colors = rng.sample(w.COLORS, len(people))
    verb, ask, answer = rng.choice([("has", "have", "has"), ("found", "find", "found"), ("wants", "want", "wants"), ("bought", "buy", "bought"), ("likes", "like", "likes")])
    told = " ".join(f"{p} {verb} {article(c)} {t}." for p, c, t in zip(people, colors, things))
    i = rng.randrange(len(people))
    held = held_out("has", people[i], things[i])
    did = "does" if verb in ("has", "wants", "likes") else "did"
    kind = rng.random()
    if kind < 0.4:
        return f"{told} What {did} {people[i]} {ask}?", f"{people[i]} {answer} {article(colors[i])} {things[i]}.", held
    if kind < 0.7:
        return f"{told} Who {verb} the {things[i]}?", f"{people[i]} {answer} the {things[i]}.", held
    return f"{told} What color is the {things[i]}?", f"The {things[i]} is {colors[i]}.", held


def how_many(rng: Random) -> tuple[str, str, bool]:
    name, thing = rng.choice(w.GIRLS + w.BOYS), rng.choice([t for t in w.THINGS if t != "box"])
    a, b = rng.randint(2, 10), rng.randint(1, 9)
    if rng.random() < 0.5 or b >= a - 1:
        told, total = f"{name} has {a} {thing}s and gets {b} more.", a + b
    else:
        told, total = f"{name} has {a} {thing}s and gives away {b}.", a - b
    return f"{told} How many {thing}s does {name} have now?", f"{name} has {total} {thing}s now.", held_out("many", told.split(" ", 1)[1])


def asked_story(rng: Random) -> tuple[str, str, bool]:
    """A request for a story about a given hero."""
    what = rng.random()
    if what < 0.3:
        tale = stories.tell(rng)
        question = rng.choice(["Tell me a story.", "Write a short story.", "Tell me a short story.", "Can you tell me a story?", "Please tell me a story.", "Write a story."])
    else:
        girl = rng.random() < 0.5
        kind = rng.choice(w.ANIMALS * 2 + (w.GIRL_PEOPLE if girl else w.BOY_PEOPLE))
        name = stories.some_name(rng, w.GIRLS if girl else w.BOYS)
        named = f" named {name}" if what < 0.6 else ""
        tale = stories.tell(rng, kind, name)
        ask = rng.choice(["Tell me a story about", "Write a short story about", "Can you tell me a story about", "Tell a story about", "Write a story about"])
        end = "?" if ask.startswith("Can") else "."
        described = f"{tale.hero.trait} {kind}" if rng.random() < 0.4 and not kind.startswith("old") else kind
        question = f"{ask} {article(described)}{named}{end}"
    return question, stories.text_of(tale), False


# Relative frequencies of the kinds of questions.
KINDS = [(addition, 14), (subtraction, 10), (opposite, 6), (capital, 6), (sound, 3), (baby, 3), (color_of, 4), (home, 3), (bigger, 6), (is_a, 5), (after, 5), (plural, 3), (legs, 3), (use, 3),
         (plain, 7), (about, 4), (unknown, 6), (who_has, 18), (how_many, 5), (asked_story, 12)]
_FUNCTIONS, _WEIGHTS = zip(*KINDS)


def ask(rng: Random, kinds=None) -> tuple[str, str]:
    """A question and its answer, never a combination kept for testing."""
    while True:
        function = rng.choice(kinds) if kinds else rng.choices(_FUNCTIONS, _WEIGHTS)[0]
        question, answer, held = function(rng)
        if not held:
            return question, answer


def ask_held_out(rng: Random, function) -> tuple[str, str]:
    """A question that is not in the corpus."""
    while True:
        question, answer, held = function(rng)
        if held:
            return question, answer
