"""Sentences that claim nothing: courtesies, announcements, and what a model says about itself, its answer or the
documents. A sentence is read clause by clause: one clause that claims something makes it a claim."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# A longer sentence is taken for a claim: the time for a sentence is bounded.
MAX_READ = 1_000

_THANKS = (
    r"(?:many )?(?:thanks|thank you)(?: (?:so|very) much| a lot| again| in advance)?"
    r"(?: for (?:asking|reaching out|waiting|reading|your (?:\w+ )?(?:question|message|request|inquiry|query|patience"
    r"|interest|understanding|time|feedback|help)))?"
    r"|(?:you are|you're) (?:very |most )?welcome|no problem(?: at all)?|(?:my|with) pleasure|(?:glad|happy) to help"
)
_GREETING = (
    r"(?:hello|hi|hey|greetings|welcome|good (?:morning|afternoon|evening|day|night))"
    r"(?: there| again| back| everyone| all| (?-i:[A-Z])\w+\Z)?"
    r"|dear (?:\w+ )?(?:customer|user|reader|guest|visitor|friend|colleague|sir|madam)s?|(?:or )?madam|sir"
    r"|(?:that(?:'s| is) )?(?:what )?(?:an? )?(?:great|good|excellent|interesting) question"
)
_APOLOGY = (
    r"(?:(?:(?:i am|i'm|we are|we're) )?(?:(?:so|very|really) )?(?:sorry|afraid)|(?:my|our) apologies|i apologi[sz]e)"
    r"(?: (?:for|about) (?:that|this|(?:the|any|my) (?:confusion|inconvenience|delay|mistake|error|misunderstanding))"
    r"| to hear that)?|unfortunately|as an ai(?: \w+){0,2}"
    r"|i (?:cannot|can't|can not|could not|couldn't|do not|don't|am unable to|am not able to)"
    r" (?:answer|help|assist|say|know|tell)(?: you)?(?: with)?(?: (?:your|the|this|that) question| that| this| it)?"
)
_FAREWELL = (
    r"(?:good)?bye|farewell|take care|cheers|good luck(?: with (?:that|it|your \w+))?|all the best|safe travels"
    r"|see you(?: (?:soon|later|again|then|there))?|(?:(?:with )?(?:best|kind|warm|kindest|warmest) )?regards"
    r"|best wishes|(?:yours )?(?:sincerely|faithfully|truly)|your (?:\w+ ){0,2}(?:assistant|team|bot|chatbot)"
    r"|have an? (?:(?:very|really|nice|good|great|wonderful|lovely|pleasant|fantastic|amazing|safe|fun) ){1,2}"
    r"(?:rest of (?:your|the) )?(?:day|time|trip|week|weekend|evening|morning|afternoon|night|stay|journey|flight|one)"
    r"(?: ahead| too)?|enjoy(?: (?:it|your \w+))?|happy (?:travels|holidays|reading|coding|cooking|shopping)"
)
_AGREED = (
    r"yes|no|sure(?: thing)?|certainly|absolutely|definitely|of course|ok(?:ay)?|understood|got it|great|perfect|please"
    r"|correct|exactly|indeed|right|true|false|done|noted|anytime|congratulations|well done|no worries|not at all"
    r"|alright|(?:see|as) (?:above|below)|(?:see|sources?|references?|citations?)\Z|i(?: am|'m) not sure|unknown|"
    r"not (?:specified|mentioned|stated|available|known|given|provided|applicable)"
)
_COURTESIES = re.compile(rf"(?:(?:{_THANKS}|{_GREETING}|{_APOLOGY}|{_FAREWELL}|{_AGREED})(?!\w)\s*+)++", re.IGNORECASE)

_OF_DOCUMENTS = (
    r"(?:documents?|sources?|passages?|context|texts?|information|documentation|materials?|excerpts?|search results)"
)
_THE_DOCUMENTS = (
    r"(?:the |these |this |those |your |any of the |none of the |two |both )*"
    rf"(?:provided |given |retrieved |available |supplied |cited )*{_OF_DOCUMENTS}"
)
_PROVIDED = (
    r"(?: (?:(?:that )?(?:you|i) (?:have )?|that (?:is|are|was|were) )?"
    r"(?:provided|given|have|found|shared|above|below|available|retrieved))?"
)
_CAN_NOT = (
    r"(?:could not|couldn't|can not|cannot|can't|did not|didn't|do not|don't|am unable to|am not able to"
    r"|was unable to|was not able to)"
)
_MENTIONED = r"(?:mentioned|specified|stated|given|provided|listed|described|discussed|covered|addressed|included)"
_NOTE = r"(?:information|mention|answer|details?)"
# That something is not known or not said. What follows is what is not said.
_NOT_SAID = re.compile(
    rf"{_THE_DOCUMENTS}(?: \w+){{0,2}}? (?:do(?:es)? not|don't|doesn't|did not|didn't|cannot|can't) (?:\w+ly )?"
    r"(?:contain|mention|say|provide|answer|state|specify|include|cover|describe|address|give|explain|discuss|indicate"
    r"|define|list|tell|clarify)\b"
    rf"|{_THE_DOCUMENTS} (?:(?:say|mention|contain)s? nothing"
    rf"|(?:contain|provide|give|have|has|offer)s? no (?:\w+ )?{_NOTE})\b"
    rf"|(?:i have no (?:\w+ )?{_NOTE}|there (?:is|was) nothing in {_THE_DOCUMENTS})\b"
    rf"|(?:it|this|that|the answer) is not (?:clear from|in) {_THE_DOCUMENTS}\b"
    rf"|(?:none|neither) of {_THE_DOCUMENTS} (?:contain|mention|say|state|specify|include|cover|describe|explain)s?\b"
    rf"|(?:i|we) {_CAN_NOT} (?:find|locate|determine|identify)\b"
    rf"|i {_CAN_NOT} (?:know|answer|say|tell|confirm|verify)\b"
    rf"|i {_CAN_NOT} (?:see|have|provide|give) (?:\w+ ){{0,4}}?(?:{_NOTE}|{_OF_DOCUMENTS}|access|response)\b"
    rf"|there (?:is|was|are|were) no (?:\w+ ){{0,3}}?{_NOTE}\b"
    rf"|there (?:is|was|are|were) no [^\d]{{1,60}}? {_MENTIONED} (?:anywhere )?in {_THE_DOCUMENTS}\b"
    rf"|no (?:\w+ )?{_NOTE} (?:is|was|are|were|could be|can be) (?:available|found|{_MENTIONED})\b"
    rf"|[^\d]{{1,60}}? (?:is|are|was|were) not (?:\w+ly )?{_MENTIONED} (?:in|by) {_THE_DOCUMENTS}\b",
    re.IGNORECASE,
)
_DISAGREE = re.compile(
    rf"{_THE_DOCUMENTS} (?:\w+ )?(?:disagree|contradict|conflict|differ|are inconsistent|do not agree)\b[^\d]*",
    re.IGNORECASE,
)
_HERE = r"(?:here(?: is| are|'s)|(?:below|following) (?:is|are)) "
_INVITES = r"(?:ask|contact|reach|let|share|provide|tell|write|get in touch|follow up|request|come back)"
_LETTING_KNOW = r"let me know(?: (?:if|whether|when|how|what|which|should|in case)\b.*)?"
# What a model says to its user about the answer: no digits, and no statement in it.
_POLITE = re.compile(
    rf"(?:just |please )*{_LETTING_KNOW}\Z"
    r"|(?:(?:i|we) )?(?:hope|trust) (?:that )?(?:this|that|it|these \w+|(?:the|my) \w+(?: above)?)(?: \w+)?"
    r" (?:helps?|answers?|clarif\w+|clears?|explains?|works?|(?:is|was|are) (?:helpful|useful|clear|of))\b"
    r"|(?:(?:i|we) )?(?:hope|trust) (?:you (?:have|enjoy|get|like|feel|had)\b|so\Z|to (?:see|hear|help)\b)"
    rf"|(?:please )?(?:feel free|(?:do not|don't) hesitate)(?:\Z| to {_INVITES}\b)"
    r"|if you(?:'d| would| still| are)? (?:have|need|want|like|require|wish|looking|interested)\b"
    r"|i(?: am|'m| will be| would be|'d be)? (?:(?:happy|glad|here|can|will|would) (?:also )?(?:to )?"
    r"(?:help|assist|hear)|(?:happy|glad) (?:that )?(?:you|i could))\b"
    r"|(?:just |please )?ask(?: me| away)?(?: (?:any|more|other|further) questions?)?\Z"
    rf"|{_HERE}(?:what|how) (?:\w+ ){{0,6}}(?:found|know|say|says|state|states|need|do|mean|means|works?|it)\Z"
    rf"|{_HERE}(?:an?|the|your|my|some)(?: \w+){{0,3}}? (?:summary|answer|overview|list|steps?|details?|information"
    r"|breakdown|explanation|results?|response|facts?|points?)\b",
    re.IGNORECASE,
)
_GOES_ON = re.compile(r"(?:you )?(?:have|need|want|would like|require|are)\b", re.IGNORECASE)
# A clause that only says where the rest comes from, or how it is connected.
_LEAD = re.compile(
    rf"(?:based on|according to|from|in|within|given|as per|looking at) {_THE_DOCUMENTS}{_PROVIDED}"
    r"|(?:in|to) (?:summary|short|brief|conclusion|sum (?:it )?up|summari[sz]e|conclude)|overall"
    r"|however|therefore|thus|so|also|still|that said|as such|at this time|for now|directly|typically|generally",
    re.IGNORECASE,
)
_CONNECTED = re.compile(r"(?:(?:and|but|or|nor|so|however|therefore|thus|also|then|still|yet)\s+)+", re.IGNORECASE)

_BREAK = re.compile(
    r"(?P<hard>\s*(?:[,;:.!?\u2026]+(?=[\s\"'\u201d)*_]|\Z)|[()\u2013\u2014\uff0c\u3001\uff1b\u3002\uff1a]|\s-\s)[\s\"'\u201d*_]*)"
    r"|\s(?:but|because|although|though|whereas|while|yet|however|so|instead|except)(?=\s)|\s(?P<soft>and|or|nor)(?=\s)",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")
_AUXILIARY = (
    r"(?:is|are|was|were|am|has|have|had|do|does|did|can|could|will|would|must|may|might|shall|should|cannot|\w+n't"
    r"|took|paid|became|won|wrote|founded|invented|gave|went|came|made)"
)
_LEXICAL = (
    r"(?:take|cost|last|open|close|start|begin|end|include|require|need|pay|charge|allow|offer|leave|arrive|work|run"
    r"|lead|rule|own|make|get|give|come|become|belong|live|win|cover|contain|support|receive|return|use|provide)s?"
    r"|goes|appl(?:y|ies)"
)
# A finite verb, as far as it can be told from a noun.
_FINITE = re.compile(
    rf"\b(?:{_AUXILIARY}\b|(?:{_LEXICAL}) (?!(?:of|for|to|in|on|at|by|from|with|and|or)\b))", re.IGNORECASE
)
_OF_THE_USER = re.compile(
    r"\b(?:you|i|it|this|anything|something|what)(?:'re| (?:are|have|need|want|can|could|may|might|should|must|would"
    r"|is|was|do))\b",
    re.IGNORECASE,
)
_QUESTION_WORD = re.compile(r"(?:how|what|when|where|who|whom|whose|which|whether|why|if|that)\b", re.IGNORECASE)
_DETERMINED = re.compile(r"(?:the|an?|any|its|their|his|her|your|other|such|in|on|for|of|about|with)\b", re.IGNORECASE)
_FEW = 2

_COLON = re.compile(r"[:\uff1a][*_\s]*\Z")
_EXPLICIT = re.compile(
    r"\b(?:(?:as )?follows|following(?: \w+){0,3}|(?:these|this)(?: \w+){0,2}|below|here|such as|(?:for )?example"
    r"|ways|steps|options)\Z",
    re.IGNORECASE,
)
_ENDS_IN_VERB = re.compile(
    rf"\b(?:{_AUXILIARY}|(?:{_LEXICAL})|says?|states?|means?|reads?|lists?|with|by|to|for|of|like)\Z", re.IGNORECASE
)
_ADVERBIAL = re.compile(r"(?:to|for|in|on|at|with|by|from|during|under|depending|after|before)\b", re.IGNORECASE)
_CONDITION = re.compile(r"(?:if|when|once|before|after|while|as|until|unless)\b", re.IGNORECASE)
_AMOUNT = re.compile(
    r"[$\u20ac\u00a3\u00a5]\s?\d|\d\s?(?:%|[$\u20ac\u00a3\u00a5]|(?:percent|euros?|dollars?|pounds?|second|minute|hour|day"
    r"|week|month|year|kg|km)s?\b|[\u0370-\uffef])",
    re.IGNORECASE,
)


class _Clause(NamedTuple):
    """`soft`: it follows "and" or "or" without a comma; `listed`: with or without."""

    text: str
    soft: bool
    listed: bool


def says_nothing(sentence: str) -> bool:
    """Whether no clause of a sentence claims something about the subject."""
    sentence = _spaced(sentence)
    if len(sentence) > MAX_READ:
        return False
    unsaid = polite = False
    for clause in _clauses(sentence):
        text = _without_courtesies(clause.text)
        if not text or _LEAD.fullmatch(text):
            continue
        if _NOT_SAID.match(text) or _DISAGREE.fullmatch(text):
            unsaid, polite = True, False
        elif _is_polite(text):
            unsaid, polite = False, True
        elif not ((unsaid and _is_listed(text, clause)) or (polite and _goes_on(text, clause))):
            return False
    return True


def states(text: str) -> bool:
    """Whether words that look like a heading say something: they have a verb, and are no question."""
    return _FINITE.search(f"{text} ") is not None and _QUESTION_WORD.match(text) is None


def only_announces(sentence: str) -> bool:
    """Whether a sentence with a colon at its end says only what comes: a label, or a lead-in as in "The steps are:"."""
    sentence = _spaced(sentence)
    if len(sentence) > MAX_READ:
        return False
    *before, last = [*_clauses(_COLON.sub("", sentence).rstrip())] or [_Clause("", soft=False, listed=False)]
    return all(says_nothing(one.text) or _introduces(one.text) for one in before) and _announces(
        _without_courtesies(last.text)
    )


def _spaced(sentence: str) -> str:
    return " ".join(sentence[: 4 * MAX_READ].split()) if len(sentence) <= 4 * MAX_READ else sentence


def _clauses(sentence: str) -> Iterator[_Clause]:
    at, soft, listed = 0, False, False
    for found in _BREAK.finditer(sentence):
        yield _Clause(sentence[at : found.start()].strip(" \"'\u201c\u201d*_"), soft, listed)
        at, soft = found.end(), found["soft"] is not None
        listed = soft or sentence[at : at + 4].lower().startswith(("and ", "or ", "nor "))
    yield _Clause(sentence[at:].strip(" \"'\u201c\u201d*_"), soft, listed)


def _without_courtesies(clause: str) -> str:
    clause = _CONNECTED.sub("", clause, count=1) if _CONNECTED.match(clause) else clause
    found = _COURTESIES.match(clause)
    return clause[found.end() :] if found else clause


def _is_polite(clause: str) -> bool:
    if (found := _POLITE.match(clause)) is None or _DIGIT.search(clause):
        return False
    return not _FINITE.search(_OF_THE_USER.sub("", clause[found.end() :]))


def _goes_on(clause: str, at: _Clause) -> bool:
    """Whether a clause goes on with what the user may have or need: "if you need help or have questions"."""
    return at.listed and _GOES_ON.match(clause) is not None and not _DIGIT.search(clause)


def _is_listed(clause: str, at: _Clause) -> bool:
    """Whether a clause is one more thing that is not said, and no statement."""
    if _DIGIT.search(clause):
        return False
    if at.listed and _QUESTION_WORD.match(clause):
        return True
    words = len(clause.split())
    if _FINITE.search(clause + " ") or _QUESTION_WORD.match(clause):
        return False
    return words <= _FEW or _DETERMINED.match(clause) is not None or (at.soft and clause[0].islower())


def _introduces(clause: str) -> bool:
    """Whether a clause before an announcement says only when or for what it holds."""
    if _CONDITION.match(clause):
        return not _AMOUNT.search(clause)
    return not _FINITE.search(clause + " ") and (_ADVERBIAL.match(clause) is not None or not _AMOUNT.search(clause))


def _announces(clause: str) -> bool:
    if _AMOUNT.search(clause):
        return False
    if says_nothing(clause) or re.match(_HERE, clause, re.IGNORECASE) or _EXPLICIT.search(clause):
        return True
    if clause.lower().startswith(("there is ", "there are ")):
        return not _DIGIT.search(clause)
    head = _ENDS_IN_VERB.sub("", clause)
    return not _FINITE.search(_OF_THE_USER.sub("", head) + " ")
