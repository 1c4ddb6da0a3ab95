"""The conversation that the demo runs: one operator, one assistant, about 2,000 tokens, ending in a question.

Plain data; anybody may read it. Both processes of the demo tokenise it on their own, as two engines would:
they share nothing but the text, so a chunk is found again only because its tokens are the same.
"""

from __future__ import annotations

from typing import TypedDict


class Turn(TypedDict):
    """One message in the form that a tokenizer's chat template takes."""

    role: str
    content: str


SYSTEM = """
You help the people who run a cluster of language-model servers. The cluster has twelve hosts with eight
GPUs each, a router in front of them, and a shared key-value cache on every host. Answer from what the
operator tells you. Prefer a measurement to an opinion, say what you are unsure of, and keep commands safe
to repeat.
"""

# (the operator says, the assistant answers), in order
EXCHANGES: tuple[tuple[str, str], ...] = (
    (
        """
Good morning. I took over this cluster yesterday and I would like to understand it before I touch anything.
People say that the time to the first token has become worse since Monday, but nobody can tell me by how
much. Where would you begin?
""",
        """
Begin by splitting the complaint into parts that can be measured. The time to the first token has four of
them: the time a request waits in the queue of its server, the time to find and load whatever part of the
prompt is already cached, the time to compute the rest of the prompt, and the time for the first token to
travel back to the user. Plot the median and the 99th percentile of each part for last week and for this
week on the same axes. If only the queue grew, you have a capacity or a routing problem. If the computation
of the prompt grew while prompts kept their length, the cache is giving you less than before. Do not change
a setting until you know which of the two you are looking at, because the remedies pull in opposite
directions.
""",
    ),
    (
        """
I have the plots now. The median wait in the queue is eleven milliseconds in both weeks. The computation of
the prompt went from 240 milliseconds to 610 at the median. Prompts are a little longer, 7,900 tokens on
average against 7,400 before. So it is the cache?
""",
        """
It points that way, but let us check it with arithmetic. Seven percent more tokens cannot explain a factor
of two and a half. So fewer of the tokens are being skipped. If a server computes about 20,000 prompt tokens
in a second, 240 milliseconds are some 4,800 tokens and 610 milliseconds are some 12,200, which is more than
a whole prompt, so the servers must also be batching several prompts together. Ask each server for the
number of prompt tokens it really computed and divide by the number of prompt tokens it received. That ratio
is the honest measure. A hit rate counted by request hides the size of each hit: a request that reuses one
block and a request that reuses thirty blocks both count as a hit.
""",
    ),
    (
        """
Computed over received was 0.38 last week and is 0.81 now. It differs between hosts, though. Hosts one to
four are at 0.42, and the other eight are all above 0.9. What is special about those four?
""",
        """
Three things could separate them. They may run another version of the software, they may be asked by the
router for another kind of traffic, or they may hold a cache that the others lost. Compare the versions
first, since that takes a minute: the image digest of the server, the revision of the model weights, the
revision of the tokenizer and the chat template. A cached block may only be used by a server that agrees on
all of those, so a host that was upgraded begins with an empty cache for its new identity even when its
memory is full of old blocks. Then compare the share of follow-up turns among the requests that each host
receives. A conversation that returns to the host where it started finds its earlier turns there; a
conversation that is sent elsewhere does not.
""",
    ),
    (
        """
You were right to ask for the template. Hosts five to twelve received a new chat template on Monday evening.
It puts the current date and the time of day in the system message, down to the second. Hosts one to four
were not upgraded because they were cordoned for a network repair.
""",
        """
Then we have the cause. A prefix cache compares prompts from the first token onward, and the identity of
every block depends on all the tokens before it. If the second line of the prompt carries the time of day,
no two prompts agree beyond that line, and everything after it has a new identity, although the text is the
same as yesterday. The system message, the tool descriptions and the examples were shared by all
conversations before; now none of it is. The blocks are still written, of course, so the caches are also
being filled with entries that will never be read again, and these push out entries that would have been
useful. That is why even hosts which serve a few old conversations do worse than you would expect.
""",
    ),
    (
        """
The people who own the template want the model to know the date. Can we give them that without losing the
cache? And how do I roll it out without making this afternoon worse than this morning?
""",
        """
Yes. Put what is common to everybody first and what changes last. The instructions, the tools and the
examples stay at the top, word for word the same for every user. The date goes in the latest user message,
or at the end of the system message if it must be there, and only the day, not the second. Then a prefix of
several thousand tokens is shared again by every request of the day. For the roll-out, take one host, let
the router send it a tenth of its normal share, and watch the ratio of computed to received tokens. It
should start near one, because its cache for the new template is empty, and fall within a few minutes as the
common prefix is published once and reused after that. When it has fallen below 0.5, give the host its full
share and go on with the next two. Never upgrade all hosts at once: a cluster whose caches are all cold
needs about twice the computing power of a warm one for the first quarter of an hour, and you do not have
that at noon.
""",
    ),
    (
        """
Good. Host five is done, its ratio fell from 0.97 to 0.41 in six minutes. While I wait for the next two: the
memory for the cache is 512 gibibytes on each host and it is always full. Is that a problem by itself?
""",
        """
A full cache is the normal state. It would be wasteful to keep memory empty in case something better
arrives. What matters is what had to leave to make room, and how soon somebody asked for it again. Look at
the age of the entries at the moment they are evicted. If most of them had not been read for an hour, the
cache is large enough for your traffic and more memory would buy little. If many are evicted within a few
minutes and then written again, the cache is too small, or something is scanning through it, like a nightly
job that reads every document once. For the second case a policy that protects entries with more than one
use is better than the plain order of last use, since a single pass cannot push out what is read again and
again.
""",
    ),
    (
        """
There is such a job, it starts at two in the morning and reads some forty thousand tickets, each one once. The
people who run it would not mind if it were slower. Should I take the cache away from it altogether?
""",
        """
Not altogether. Its tickets are all different, but its instructions are the same for each, and these are
worth keeping. Let it read from the cache without limit and let it write only what has been asked for a
second time. Then its instructions stay, because every ticket asks for them, and the tickets themselves
never enter. If your cache has quotas, give the job a share of its own, for instance sixteen gibibytes, so
that whatever it writes can only push out its own entries. Afterwards compare two figures at nine in the
morning, before and after the change: the share of prompt tokens that the first requests of the day reuse,
and the median time to the first token. If neither of them moves, the job was not the reason, and you should
undo the change and keep the simpler configuration. I would expect the second policy to matter more than the
quota, but that is an opinion until you have measured it. Write down which of the two you tried first, and
when: a change that is made together with another one at night teaches you nothing about either, and
somebody else will have to guess in the morning.
""",
    ),
    (
        """
One last thing that worries me. When a server process crashes in the middle of writing its blocks to the
cache, can another server pick up half of a block and produce nonsense? My predecessor left a note that says
to clear the cache after each crash.
""",
        """
That note describes a system in which a block becomes visible before it is complete. In a sound design a
writer first reserves space that nobody else can see, fills it, has its checksum computed, and only then
publishes it in a single step. A writer that dies before this step has published nothing, and its space is
taken back. A reader holds a lease on what it reads, and memory is given to somebody else only when no lease
on it is left, however long that takes. You can test it instead of believing it: kill a server with a signal
that it cannot catch, a few hundred times, while another one reads and compares checksums. If no mismatch
and no lost memory is found, delete the note. Clearing the cache after each crash costs you the warm state
of the whole host and hides the defect.
""",
    ),
)

QUESTION = """
Thank you. I have to report to the other teams in ten minutes. Please sum up in three short sentences what
went wrong on Monday, how we know it, and what we are doing about it.
"""


def turns() -> list[Turn]:
    """The whole conversation as chat messages: system, alternating user and assistant, user last."""
    messages = [Turn(role="system", content=_one_line(SYSTEM))]
    for said, answered in EXCHANGES:
        messages.append(Turn(role="user", content=_one_line(said)))
        messages.append(Turn(role="assistant", content=_one_line(answered)))
    messages.append(Turn(role="user", content=_one_line(QUESTION)))
    return messages


def _one_line(text: str) -> str:
    """Undo the line breaks that only the width of this file put in."""
    return " ".join(text.split())
