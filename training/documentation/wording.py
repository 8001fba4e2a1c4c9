"""The words of questions: verb forms, persons, and the many ways in which people type one question."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Sequence
from random import Random

from anabranch.text.words import STOPWORDS

# Verbs of technical English. Only these are inflected, so that no noun is taken for a verb.
VERBS = frozenset(
    """accept access achieve activate adapt add adjust aggregate allow alter annotate append apply assign associate
    attach authenticate avoid bind block build bundle bypass cache calculate call cancel capture cascade cast
    catch change check choose clean clear clone close collect combine compare compile compose compress compute
    configure confirm connect construct contain contribute control convert copy correlate count crawl create
    customize cut debug declare decode decorate decrease defer define delay delete deploy describe deserialize
    detect determine develop disable discover dispatch display distinguish distribute document download drop dump
    duplicate edit eliminate embed emit emulate enable encode encrypt enforce ensure escape establish evaluate
    examine exclude execute expand expire explain export expose extend extract fetch filter find finish flush
    follow force format forward generate get give group guarantee handle hash hide highlight host identify ignore
    implement import improve include increase indicate inherit initialize inject insert inspect install
    instantiate integrate intercept interpret interrupt introspect invalidate invoke isolate iterate join keep
    launch limit link list load localize locate lock log maintain make manage map mark match measure merge migrate
    mix modify monitor move name navigate nest obtain omit open optimize order organize overload override
    overwrite package paginate parallelize parametrize parse pass perform persist pickle pin place point populate
    post prefetch prepare present preserve prevent print process produce profile propagate protect provide publish
    pull push put query queue quit quote raise read rebuild receive record recover redirect reduce refer reference
    reflect refresh register reject release reload remove rename render reorder repeat replace report represent
    request require reset resolve respond restart restore restrict result retain retrieve retry return reuse
    revert revoke rewrite roll rotate round route run sample save scale schedule scrape search secure select send
    separate serialize serve set share show shut silence simplify simulate skip slice solve sort specify split
    stack start stop store stream structure submit subclass subscribe summarize support suppress switch
    synchronize tag target terminate test throttle track transfer transform translate traverse trigger
    troubleshoot truncate tune turn type understand uninstall unload unpack unregister update upgrade upload use
    validate verify view visualize wait walk warn work wrap write yield""".split()
)
_DOUBLED = frozenset(
    "get put set run cut drop log map pin plug quit shut skip stop submit tag trim wrap begin let hit".split()
)


def gerund(verb: str) -> str:
    if verb in _DOUBLED:
        return verb + verb[-1] + "ing"
    return (verb[:-1] if verb.endswith("e") and not verb.endswith("ee") else verb) + "ing"


def third(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


GERUNDS = {gerund(verb): verb for verb in VERBS}
THIRDS = {third(verb): verb for verb in VERBS}

_PERSONS: Sequence[tuple[str, str]] = (
    (r"\byou are\b", "I am"),
    (r"\byou're\b", "I'm"),
    (r"\byou've\b", "I've"),
    (r"\byou'll\b", "I will"),
    (r"\b(allow|allows|let|lets|enable|enables|give|gives|help|helps|to|for|with|tell|tells) you\b", r"\1 me"),
    (r"\byourself\b", "myself"),
    (r"\byours\b", "mine"),
    (r"\byour\b", "my"),
    (r"\byou\b", "I"),
)


def first_person(words: str) -> str:
    """Said by the reader: "your" becomes "my"."""
    for pattern, said in _PERSONS:
        words = re.sub(pattern, said, words, flags=re.IGNORECASE)
    return words


def lower_first(words: str) -> str:
    """Without the capital of a sentence's first word; names and acronyms keep theirs."""
    first = words.split(" ", 1)[0]
    if not first[:1].isupper() or first[1:] != first[1:].lower() or not first.isalpha() or first in NAMES:
        return words if first != "A" else "a" + words[1:]
    return words[0].lower() + words[1:]


def upper_first(words: str) -> str:
    return words[:1].upper() + words[1:]


NAMES = frozenset(
    "Django SQLAlchemy Celery Scrapy Sphinx Jinja Python Redis Windows Linux Docker Oracle Pygments Unicode English "
    "Apache Nginx Twisted Google Amazon Azure Mongo Cython Excel".split()
)


def verb_phrase(heading: str) -> str | None:
    """The imperative of a heading: "Writing custom fields", "How to write custom fields", "Write custom fields"."""
    words = re.sub(r"^\d+[.)]\s+", "", heading).strip().rstrip(".")
    words = re.sub(r"^how to\s+", "", words, flags=re.IGNORECASE)
    first, _, rest = words.partition(" ")
    base = GERUNDS.get(first.lower()) or (first.lower() if first.lower() in VERBS else None)
    if base is None or len(rest) < 4 or re.match(r"(?:and|or|vs\.?|is|are|of)\b", rest, re.IGNORECASE):
        return None
    if first.lower() in VERBS and words is heading and first.lower() in AMBIGUOUS:
        return None
    rest = re.sub(r"\b(and|or) (\w+ing)\b", lambda each: f"{each[1]} {GERUNDS.get(each[2].lower(), each[2])}", rest)
    return f"{base} {rest}"


# Also nouns: "Test discovery", "Query parameters".
AMBIGUOUS = frozenset(
    """access block build bundle cache call cascade cast change check contribute control copy count debug delay display
    document download drop export filter force format group hash host import include index limit link list load
    lock log map mark match measure merge mix name order package pass place point post present process profile
    query queue quote record reference release report
    insert support request result return route run sample scale schedule search
    secure select sort slice split stack start stop store stream structure switch tag target test track transfer
    transform trigger type update upgrade upload use view walk work wrap""".split()
)

SYNONYMS: Sequence[tuple[str, Sequence[str]]] = (
    (r"delete", ("remove", "get rid of")),
    (r"remove", ("delete", "drop")),
    (r"execute", ("run",)),
    (r"run", ("execute", "start")),
    (r"disable", ("turn off", "switch off", "deactivate")),
    (r"enable", ("turn on", "switch on", "activate")),
    (r"modify", ("change", "edit")),
    (r"change", ("modify", "alter")),
    (r"create", ("make", "set up", "build")),
    (r"maximum number of", ("limit on the number of", "upper limit for the number of", "max number of")),
    (r"maximum", ("max", "upper limit for the", "largest")),
    (r"minimum", ("min", "smallest")),
    (r"number of", ("count of", "amount of")),
    (r"specify", ("set", "define", "give")),
    (r"specifies", ("sets", "defines")),
    (r"define", ("specify", "declare")),
    (r"retrieve", ("get", "fetch")),
    (r"obtain", ("get",)),
    (r"get the", ("obtain the", "retrieve the")),
    (r"display", ("show",)),
    (r"displays", ("shows",)),
    (r"show", ("display",)),
    (r"store", ("save", "keep")),
    (r"stored", ("saved", "kept")),
    (r"stores", ("saves", "keeps")),
    (r"save", ("store",)),
    (r"prevent", ("stop", "avoid")),
    (r"avoid", ("prevent",)),
    (r"customize", ("adapt", "change", "tailor")),
    (r"override", ("replace", "overrule")),
    (r"configure", ("set up",)),
    (r"determine", ("find out", "decide")),
    (r"determines", ("decides", "controls")),
    (r"controls", ("determines", "governs")),
    (r"invoke", ("call",)),
    (r"call", ("invoke",)),
    (r"called", ("invoked",)),
    (r"terminate", ("stop", "end", "kill")),
    (r"directory", ("folder",)),
    (r"directories", ("folders",)),
    (r"parameter", ("argument", "option")),
    (r"argument", ("parameter",)),
    (r"arguments", ("parameters",)),
    (r"additional", ("extra", "more")),
    (r"custom", ("my own", "own")),
    (r"multiple", ("several", "more than one")),
    (r"several", ("multiple",)),
    (r"allows", ("lets",)),
    (r"permitted", ("allowed",)),
    (r"allowed", ("permitted",)),
    (r"error", ("failure", "problem")),
    (r"errors", ("failures",)),
    (r"exception", ("error",)),
    (r"automatically", ("by itself", "without doing anything")),
    (r"entire", ("whole",)),
    (r"begin", ("start",)),
    (r"wait", ("pause",)),
    (r"seconds", ("secs", "sec")),
    (r"database", ("db",)),
    (r"documentation", ("docs",)),
    (r"generate", ("create", "produce")),
    (r"generates", ("creates", "produces")),
    (r"perform", ("do", "carry out")),
    (r"verify", ("check",)),
    (r"check", ("verify", "test")),
    (r"validate", ("check",)),
    (r"supply", ("give", "provide")),
    (r"provide", ("give", "supply")),
    (r"receive", ("get",)),
    (r"require", ("need",)),
    (r"requires", ("needs",)),
    (r"required", ("needed", "necessary")),
    (r"write", ("create",)),
    (r"install", ("set up",)),
    (r"ignore", ("skip", "leave out")),
    (r"ignored", ("skipped", "left out")),
    (r"exclude", ("leave out", "skip")),
    (r"include", ("add",)),
    (r"combine", ("join", "merge", "put together")),
    (r"merge", ("combine", "join")),
    (r"convert", ("turn", "transform")),
    (r"purpose", ("point", "use")),
    (r"raised", ("thrown",)),
    (r"raise", ("throw",)),
    (r"raises", ("throws",)),
    (r"timeout", ("time limit",)),
    (r"time limit", ("timeout",)),
    (r"restrict", ("limit",)),
    (r"limit", ("restrict", "cap")),
    (r"increase", ("raise",)),
    (r"reduce", ("lower", "decrease")),
    (r"faster", ("quicker",)),
    (r"identical", ("the same",)),
    (r"handle", ("deal with", "process")),
    (r"utilize", ("use",)),
    (r"use (?=the |an? |my )", ("work with ",)),
)
_SYNONYMS = [(re.compile(rf"(?<![\w`'\"./(-]){word}(?![\w`'\"./(-])"), others) for word, others in SYNONYMS]


def reworded(question: str, random: Random, most: int = 2) -> str:
    """With up to two words replaced by synonyms; code and names stay."""
    options = [(pattern, others) for pattern, others in _SYNONYMS if pattern.search(question)]
    for pattern, others in random.sample(options, min(most, len(options))):
        other = random.choice(others)
        question = pattern.sub(other, question, count=1)
        right, wrong = ("an", "a") if other[0] in "aeiou" else ("a", "an")
        question = re.sub(rf"\b{wrong} {other}\b", f"{right} {other}", question)
    return question


_ASKING = frozenset(
    """how what does which explain tell show give why when where there exactly would want wants need needs kind happens
    looking possible way me effect about read information explained does""".split()
)


def keywords(question: str) -> str:
    """As typed into a search box."""
    words = [word.strip('?,;".') for word in question.split()]
    return " ".join(word for word in words if word and word.lower() not in STOPWORDS | _ASKING)


_POLITE = ("Can you tell me {}", "Could you tell me {}", "Please tell me {}", "I'd like to know {}", "I wonder {}")
_ABOUT = (" in {}?", " with {}?", " in {}?")


def with_package(question: str, package: str, random: Random) -> str:
    """With the package's name, at one end or the other."""
    if package.lower() in question.lower():
        return question
    if question.endswith("?") and random.random() < 0.6:
        return question[:-1] + random.choice(_ABOUT).format(package)
    if question[:1].isupper() and question.split(" ", 1)[0] in (
        "How",
        "What",
        "Which",
        "When",
        "Why",
        "Can",
        "Does",
        "Is",
    ):
        return f"In {package}, {question[:1].lower()}{question[1:]}"
    if question.split(" ", 1)[0] in ("Explain", "Tell", "Show", "Give", "Where", "I", "Name", "List"):
        return f"{question} in {package}" if question[-1].isalnum() else question
    return f"{package} {question}"


def mistyped(question: str, random: Random) -> str:
    """With two neighbouring letters of a long word swapped, or one left out."""
    places = list(re.finditer(r"\b[a-z]{6,}\b", question))
    if not places:
        return question
    at = (place := random.choice(places)).start() + random.randrange(1, len(place[0]) - 2)
    if random.random() < 0.5:
        return question[:at] + question[at + 1 :]
    return question[:at] + question[at + 1] + question[at] + question[at + 2 :]


def typed(question: str, package: str, random: Random) -> str:
    """One of the ways in which people type this question."""
    if random.random() < 0.35:
        question = reworded(question, random)
    if random.random() < 0.22:
        question = with_package(question, package, random)
    style = random.random()
    if style < 0.12 and len(question.split()) > 3:
        brief = keywords(question)
        has_name = re.search(r"[_.`()]|[a-z][A-Z]|\b[A-Z]{3}", brief) is not None
        question = brief if len(brief.split()) > (1 if has_name else 3) else question
    elif style < 0.15 and (found := re.match(r"(What|Which|Why|When|Where) (is|are) (?!the way)(.+)\?$", question)):
        question = random.choice(_POLITE).format(f"{found[1].lower()} {found[3]} {found[2]}") + "."
    elif style < 0.25:
        question = question.rstrip("?")
    if random.random() < 0.22:
        question = question.lower()
    if random.random() < 0.015:
        question = mistyped(question, random)
    return question
