"""The common function words of English, which carry structure and no subject."""

# With what is left of contractions when they are cut at the apostrophe.
_WORDS = """
a about above after again against all almost already also although always am among an and another any anyone anything
are aren around as at be because been before behind being below beside between beyond both but by can cannot could
couldn did didn do does doesn doing don down during each either else even ever every everyone everything except few
for from had hadn has hasn have haven having he hence her here hers herself him himself his how however i if in indeed
into is isn it its itself just ll many may maybe me might more most much must my myself neither never nevertheless no
nobody none nor not nothing now of off often on once one only onto or other others otherwise our ours ourselves out
over own per perhaps quite rather re really s same shall she should shouldn since so some somebody someone something
sometimes still such t than that the their theirs them themselves then there therefore these they this those though
through throughout thus to too toward towards under unless until up upon us ve very via was wasn we were weren what
whatever when whenever where whereas wherever whether which while who whoever whom whose why will with within without
would wouldn yet you your yours yourself yourselves
"""

STOPWORDS = frozenset(_WORDS.split())
