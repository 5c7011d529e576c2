"""Generates short stories from a small grammar: characters, a plot, and facts for questions."""

from random import Random

import words as w


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def some_name(rng: Random, names: list[str], but_not: str = "") -> str:
    """A name, sometimes an invented one, so that the model learns to copy names from the text."""
    if rng.random() < 0.3:
        return "".join(rng.choice(w.SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()
    return rng.choice([name for name in names if name != but_not])


class Character:
    """A character of a story, with a fixed name and fixed pronouns."""

    def __init__(self, rng: Random, kind: str | None = None, name: str | None = None, but_not: str = ""):
        girl = name in w.GIRLS if name else rng.random() < 0.5
        self.name = name or some_name(rng, w.GIRLS if girl else w.BOYS, but_not)
        people = w.GIRL_PEOPLE if girl else w.BOY_PEOPLE
        self.kind = kind or rng.choice(people if rng.random() < 0.45 else w.ANIMALS)
        self.trait = rng.choice(w.TRAITS)
        self.he, self.him, self.his = ("she", "her", "her") if girl else ("he", "him", "his")

    @property
    def described(self) -> str:
        kind = self.kind if self.kind.startswith(("old", self.trait)) else f"{self.trait} {self.kind}"
        return article(kind)

    def __str__(self) -> str:
        return self.name


class Tale:
    """The sentences of one story, and questions about it with their answers."""

    def __init__(self, rng: Random, kind: str | None = None, name: str | None = None):
        self.rng = rng
        self.hero = Character(rng, kind, name)
        self.other = Character(rng, but_not=self.hero.name)
        while self.other.kind == self.hero.kind:
            self.other = Character(rng, but_not=self.hero.name)
        self.home, self.home_noun = rng.choice(w.PLACES)
        self.sentences: list[str] = []
        self.facts: list[tuple[str, str]] = []

    def say(self, *variants: str) -> None:
        sentence = self.rng.choice(variants)
        self.sentences.append(sentence[0].upper() + sentence[1:])

    def maybe(self, *variants: str) -> None:
        if self.rng.random() < 0.5:
            self.say(*variants)

    def fact(self, question: str, answer: str) -> None:
        self.facts.append((question, answer))

    def open(self) -> None:
        h, home, rng = self.hero, self.home, self.rng
        day = rng.choice(w.WEATHER)
        self.say(f"Once upon a time, there was {h.described} named {h}.", f"Once upon a time, there lived {h.described} named {h}.",
                 f"Once upon a time there was {h.described} named {h}.", f"Once upon a time, {home}, there lived {h.described} named {h}.",
                 f"Long ago, {home}, there lived {h.described} named {h}.", f"There once was {h.described} named {h}.", f"There was {h.described} named {h}.",
                 f"{home} lived {h.described} named {h}.", f"{h} was {h.described} who lived {home}.", f"One {day} morning, {h} the {h.kind} woke up early.", f"One morning, the {h.kind} {h} woke up early.", f"In the morning, {h} the {h.kind} went outside.",
                 f"It was a {day} day, and {h} the {h.kind} wanted to go outside.", f"This is the story of {h}, {h.described}.", f"One day, {h.described} named {h} went for a walk.")
        self.fact(f"What was the name of the {h.kind}?", f"The {h.kind} was named {h}.")
        self.fact(f"Who was {h}?", f"{h} was {article(h.kind)}.")
        if self.home not in self.sentences[0].lower():
            self.say(f"{h} lived {home}.", f"{h} lived {home} and knew everyone there.", f"{h.he} lived {home}.")
        self.fact(f"Where did {h} live?", f"{h} lived {home}.")

    def close(self) -> None:
        h, o, rng = self.hero, self.other, self.rng
        good = rng.choice(w.FEELINGS_GOOD)
        self.say(f"{h} was very {good}.", f"{h} and {o} were both {good}.", f"That night, {h} went to bed and felt {good}.", f"{h} smiled all the way home.", f"{h} thanked {o}, and they went home together.",
                 f"From that day on, {h} and {o} were the best of friends.")
        self.maybe("They lived happily ever after.", "And that is the end of the story.", "The end.", f"Everyone {self.home.replace('a ', 'the ', 1)} heard about it.", f"{h} never forgot that day.")


def lost(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    color, thing = rng.choice(w.COLORS), rng.choice(w.THINGS)
    first, second, found = rng.sample(w.SPOTS, 3)
    bad = rng.choice(w.FEELINGS_BAD)
    t.say(f"{h} had {article(color)} {thing} and loved it very much.", f"{h.his} favorite thing was {article(color)} {thing}.", f"{h} had a beautiful {color} {thing}.")
    t.say(f"One day, the {thing} was gone.", f"One morning, {h} could not find the {color} {thing}.", f"But one day {h} lost the {thing}.")
    t.say(f"{h} looked {first}, but it was not there.", f"First {h.he} looked {first}, but found nothing.")
    t.say(f"Then {h.he} looked {second}, but it was not there either.", f"Then {h.he} looked {second}, and still there was no {thing}.")
    t.say(f"{h} felt {bad} and began to cry.", f"{h} felt very {bad}.", f"{h} sat down and felt {bad}.")
    t.say(f"Then {o} the {o.kind} came by and asked, \"What is wrong?\"", f"{o} the {o.kind} saw {h.him} and asked, \"Can I help you?\"", f"A friend named {o} came to help. {o} was {article(o.kind)}.")
    t.say(f"\"I lost my {color} {thing},\" said {h}.", f"\"My {thing} is gone,\" said {h}.")
    t.say(f"Together they looked {found}, and there was the {thing}!", f"{o} looked {found} and found the {color} {thing}.", f"\"Let us look together,\" said {o}. They found the {thing} {found}.")
    t.fact(f"What did {h} lose?", f"{h} lost {article(color)} {thing}.")
    t.fact(f"Where was the {thing}?", f"The {thing} was {found}.")
    t.fact(f"What color was the {thing}?", f"The {thing} was {color}.")
    t.fact(f"Who helped {h}?", f"{o} the {o.kind} helped {h}.")


def share(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    food = rng.choice(w.FOODS)
    short = food.split(" of ")[0] if " of " in food else food
    t.say(f"One day, {h} had {article(food)} for lunch.", f"One {rng.choice(w.WEATHER)} day, {h} found {article(food)}.", f"{h} was hungry and took out {article(food)}.")
    t.say(f"Just then {h.he} met {o}, {o.described}.", f"On the road {h.he} met {o.described} named {o}.", f"Then {o} the {o.kind} came along.")
    t.say(f"{o} had nothing to eat and looked very hungry.", f"\"I have not eaten all day,\" said {o}.", f"\"I am so hungry,\" said {o}.")
    t.say(f"{h} thought for a moment and made two parts of it.", f"\"We can share my {short},\" said {h}.", f"{h} smiled and gave half of the {short} to {o}.")
    t.say("They sat down and ate together.", f"They ate together {rng.choice(w.SPOTS)}.", f"\"Thank you, {h},\" said {o}. \"You are very kind.\"")
    t.say(f"The next day, {o} came back with a gift for {h}.", f"After that, {o} always shared with {h} too.", f"It tasted better because they shared it.")
    t.fact(f"What did {h} share?", f"{h} shared {article(food)}.")
    t.fact(f"Who was hungry?", f"{o} was hungry.")


def learn(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    skill = rng.choice(w.SKILLS)
    t.say(f"{h} wanted to learn to {skill}.", f"More than anything, {h} wanted to {skill}.", f"{h} dreamed of learning to {skill}.")
    t.say(f"But it was not easy.", f"\"It is too hard for me,\" said {h}.", f"At first {h.he} could not do it at all.", f"Everyone laughed at {h.him}.")
    t.say(f"So {h.he} went to {o}, {o.described}.", f"One day {h.he} met {o} the {o.kind}, who could {skill} very well.", f"{o} the {o.kind} said, \"I will teach you.\"")
    t.say(f"{o} showed {h.him} how to do it, step by step.", f"\"Try a little every day,\" said {o}.", f"\"Do not give up,\" said {o}. \"Try again.\"")
    t.say(f"{h} tried again and again.", f"Every day {h} practiced for an hour.", f"{h} practiced in the morning and in the evening.")
    t.say(f"After a week, {h} could {skill}.", f"At last {h} could {skill}!", f"One day it worked, and {h} could {skill} very well.")
    t.fact(f"What did {h} want to learn?", f"{h} wanted to learn to {skill}.")
    t.fact(f"Who taught {h}?", f"{o} the {o.kind} taught {h}.")


def build(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    thing = rng.choice(w.BUILDS)
    short = thing.split(" ", 1)[1]
    t.say(f"{h} wanted to build {thing}.", f"One day, {h} decided to build {thing}.", f"{h} had a plan. {h.he.capitalize()} wanted to build {thing}.")
    t.say(f"{h} worked all morning, but then a strong wind came and broke it.", f"{h} worked very hard, but the {short} fell down.", f"The work was hard, and the {short} broke twice.")
    t.say(f"{h} was {rng.choice(w.FEELINGS_BAD)}, but {h.he} did not give up.", f"\"I will never finish it,\" said {h}.", f"{h} sat down and sighed.")
    t.say(f"{o} the {o.kind} saw it and said, \"Let me help you.\"", f"Then {o} the {o.kind} came to help.", f"\"Two can do more than one,\" said {o} the {o.kind}.")
    t.say("They worked together until the sun went down.", f"{h} held the pieces, and {o} tied them with rope.", "One carried the wood, and the other used the hammer.")
    t.say(f"In the evening the {short} was ready, and it was strong.", f"Soon the {short} was ready.", f"This time the {short} did not break.")
    t.fact(f"What did {h} build?", f"{h} built {thing}.")
    t.fact(f"Who helped {h}?", f"{o} the {o.kind} helped {h}.")


def fear(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    what = rng.choice(w.FEARS)
    t.say(f"{h} was afraid of {what}.", f"There was only one problem. {h} was afraid of {what}.", f"{h} was not afraid of anything, except {what}.")
    t.say(f"One night, {h.he} heard someone call for help.", f"One day, {h.his} friend {o} was in trouble.", f"One evening, {o} the {o.kind} did not come home.")
    t.say(f"\"I must be brave,\" said {h}.", f"{h} was scared, but {h.he} wanted to help.", f"{h}'s heart beat fast, but {h.he} went anyway.")
    t.say(f"{h} took a lantern and walked {rng.choice(['through the forest', 'over the hill', 'along the river', 'down to the beach', 'across the field'])}.", f"{h} took a deep breath and went outside.")
    place = rng.choice(w.SPOTS)
    t.say(f"There was {o} the {o.kind}, stuck {place}.", f"{h.he} found {o} {place}. {o} could not move.", f"{o} was {place} and could not get out.")
    t.say(f"{h} pulled and pulled until {o} was free.", f"{h} helped {o} to get up.", f"{h} took {o} by the hand and led the way home.")
    t.say(f"\"You are so brave,\" said {o}.", f"\"I was afraid,\" said {h}, \"but you needed me.\"", f"After that, {h} was not afraid of {what} any more.")
    t.fact(f"What was {h} afraid of?", f"{h} was afraid of {what}.")
    t.fact(f"Where was {o}?", f"{o} was {place}.")


def grow(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    plant = rng.choice(w.PLANTS)
    short = plant.split(" ", 1)[1]
    t.say(f"In spring, {h} put a seed into the ground.", f"One day, {o} the {o.kind} gave {h} a small seed.", f"{h} found a tiny seed and planted it in the garden.")
    t.say(f"Every day {h} gave it water.", f"{h} watered it every morning.", f"{h.he} gave it water and kept the birds away.")
    t.say("But nothing happened for a long time.", f"Days went by, and {h} saw nothing.", f"\"Nothing grows here,\" said {h}.")
    t.say(f"\"Be patient,\" said {o} the {o.kind}.", f"{o} the {o.kind} said, \"Good things take time.\"", f"\"Wait a little longer,\" said {o} the {o.kind}.")
    t.say("Then one morning there was a small green leaf.", "After a week of rain, a little green leaf came out.", "At last something green came out of the ground.")
    t.say(f"In summer it was {plant}, the most beautiful one {t.home}.", f"It grew and grew until it was {plant}.", f"By the end of summer it had become {plant}.")
    t.fact(f"What did {h} grow?", f"{h} grew {plant}.")
    t.fact(f"What did {h} plant?", f"{h} planted a seed.")
    t.maybe(f"{h} gave a part of it to everyone.", f"Everyone came to see the {short}.")


def sail(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    goal = rng.choice(["an island", "a far harbor", "the other side of the sea", "the mouth of the river"])
    cargo = rng.choice(w.FOODS + ["box of gold", "letter for the queen", "bag of salt"])
    t.say(f"{h} had a ship with many oars.", f"One day, {h} went to sea on a ship with three rows of oars.", f"{h} and {o} the {o.kind} had a long ship.")
    t.say(f"They wanted to sail to {goal} with {article(cargo)}.", f"{h} had to bring {article(cargo)} to {goal}.")
    t.say("On the second day a great storm came.", "Then the wind grew strong, and the waves were as high as houses.", "In the night the sky became black, and a storm began.")
    t.say("Every rower pulled at a different time, and the ship went in circles.", "The rowers were afraid, and each one pulled alone.", "The ship turned left and right and did not move forward.")
    t.say(f"\"Pull together!\" called {o} the {o.kind}, and began to beat a drum.", f"{o} the {o.kind} took a drum and beat it slowly. \"One, two, one, two!\"", f"\"Listen to the drum,\" said {h}. \"We must pull on the same stroke.\"")
    t.say("Soon all oars moved as one, and the ship flew over the waves.", "Now every rower pulled on the same stroke, and the ship moved fast.", "They pulled together, and the ship came out of the storm.")
    t.say(f"In the morning they reached {goal}.", f"After three days they came to {goal}.", f"When the sun rose, they saw {goal}.")
    t.fact(f"Where did {h} sail?", f"{h} sailed to {goal}.")
    t.fact("Why did the ship move fast?", "The ship moved fast because every rower pulled on the same stroke.")


def play(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    game = rng.choice(w.GAMES)
    weather = rng.choice(["rainy", "cold", "snowy", "foggy"])
    t.say(f"{h} had no friends and was often alone.", f"{h} was new there and knew nobody.", f"{h} wanted to play, but nobody was there.")
    t.say(f"One {weather} day, {h.he} heard a knock at the door.", f"One {weather} day, {h} saw someone {rng.choice(w.SPOTS)}.", f"One {weather} day, somebody called {h.his} name.")
    t.say(f"It was {o}, {o.described}.", f"It was {o} the {o.kind}.", f"There stood {o.described} named {o}.")
    t.say(f"\"Do you want to play {game}?\" asked {o}.", f"\"I am alone too,\" said {o}. \"Let us play {game}.\"", f"{o} asked, \"Can you play {game}?\"")
    t.say(f"\"Yes, please!\" said {h}.", f"\"I do not know how,\" said {h}. \"Then I will show you,\" said {o}.", f"{h} jumped up and clapped.")
    t.say(f"They played {game} all day and laughed a lot.", f"They played {game} until it was dark.", f"First {o} won, and then {h} won.")
    t.fact(f"What did {h} and {o} play?", f"{h} and {o} played {game}.")
    t.fact(f"How was the weather?", f"It was a {weather} day.")


def rescue(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    trap = rng.choice(["fell into a deep hole", "was stuck in a tall tree", "was caught in a net", "was stuck in the mud", "fell into the river", "was lost in the fog"])
    tool = rng.choice(["a long rope", "a ladder", "a strong branch", "a small boat", "a bright lantern"])
    t.say(f"One day, {o} the {o.kind} {trap}.", f"One morning, {h} heard a cry. {o} the {o.kind} {trap}.")
    t.say(f"\"Help! Help!\" called {o}.", f"\"Please help me, {h}!\" cried {o}.")
    t.say(f"{h} ran as fast as {h.he} could.", f"\"I am coming!\" called {h}.", f"{h} did not wait for a moment.")
    t.say(f"{h.he} took {tool} and called the others.", f"{h} brought {tool}, but {h.he} was not strong enough alone.")
    t.say("\"Everyone pull at the same time,\" they said. \"One, two, three!\"", "They all worked together.", "One pulled, then two pulled, then three pulled together.")
    t.say(f"At last {o} was safe.", f"Soon {o} was free and safe again.", f"{o} came out and was safe.")
    t.say(f"\"Thank you, {h},\" said {o}. \"You saved me.\"", f"{o} hugged {h} for a long time.", f"\"A good friend comes when you call,\" said {o}.")
    t.fact(f"What did {h} use to help?", f"{h} used {tool}.")
    t.fact(f"Who needed help?", f"{o} the {o.kind} needed help.")


def gift(t: Tale) -> None:
    h, o, rng = t.hero, t.other, t.rng
    color, thing = rng.choice(w.COLORS), rng.choice(w.THINGS)
    t.say(f"It was the birthday of {o} the {o.kind}.", f"{h} had a good friend, {o} the {o.kind}, and it was {o}'s birthday.", f"Tomorrow was the birthday of {o}, {o.described}.")
    t.say(f"{h} wanted to give {o.him} something special.", f"{h} had no money, but {h.he} wanted to bring a gift.", f"\"What can I give to {o}?\" thought {h}.")
    t.say(f"{h} worked all night and made {article(color)} {thing}.", f"In the market {h.he} saw {article(color)} {thing} and bought it.", f"{h.he} took {h.his} own {color} {thing} and cleaned it until it was like new.")
    t.say(f"In the morning {h} brought it to {o}.", f"{h} put it into a box and took it to {o}.", f"{h} gave it to {o} with a smile.")
    t.say(f"\"{article(color).capitalize()} {thing}! It is just what I wanted,\" said {o}.", f"{o} opened the box and laughed with joy.", f"\"This is the best gift of all,\" said {o}.")
    t.say("They ate cake and sang songs.", f"All friends came, and they played {rng.choice(w.GAMES)}.", "They danced until the moon came up.")
    t.fact(f"What did {h} give to {o}?", f"{h} gave {o} {article(color)} {thing}.")
    t.fact("Whose birthday was it?", f"It was the birthday of {o}.")


PLOTS = [lost, share, learn, build, fear, grow, sail, play, rescue, gift]

# The kind of the hero often determines the plot, so that the opening of a story matters for the rest.
PLOT_OF = {"hungry": share, "friendly": share, "clever": learn, "curious": learn, "lazy": learn, "busy": build, "proud": build, "shy": fear, "quiet": fear, "patient": grow, "gardener": grow, "farmer": grow,
           "lonely": play, "funny": play, "brave": rescue, "careful": rescue, "kind": gift, "gentle": gift, "cheerful": gift, "happy": lost, "young": lost,
           "captain": sail, "sailor": sail, "rower": sail, "fisher": sail, "king": sail, "queen": sail, "pirate": sail}


def plot_for(rng: Random, hero: Character):
    fitting = [PLOT_OF[word] for word in (hero.kind, hero.trait) if word in PLOT_OF]
    return fitting[0] if fitting and rng.random() < 0.7 else rng.choice(PLOTS)


def tell(rng: Random, kind: str | None = None, name: str | None = None) -> Tale:
    """A whole story, about a hero of `kind` with `name` if given."""
    tale = Tale(rng, kind, name)
    tale.open()
    plot_for(rng, tale.hero)(tale)
    tale.close()
    return tale


def text_of(tale: Tale) -> str:
    """The story as running text, sometimes in two paragraphs."""
    sentences = tale.sentences
    if tale.rng.random() < 0.2:
        cut = tale.rng.randint(2, len(sentences) - 2)
        return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])
    return " ".join(sentences)
