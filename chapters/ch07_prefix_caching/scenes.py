"""Things to see in the simulator of chapter 7, step by step: the worked example, the six traps, and others."""

from chapters.player import Scene

JAPAN, READER, BOTH = "I come from Japan", "I like to read", "my family lives in that country too"
SEA = "look at this picture of the sea"
TRAIN = "story-0 a train left the valley at dawn with no one aboard"
BREAD = "story-1 bake the bread until its crust sounds hollow"
LAMPS = "story-2 seven lamps hung over the bridge and none was lit"
KEEPER = "you keep a small lighthouse answer in short clear words"
SCENES = [
    Scene(
        "The worked example of vLLM's document",
        "/x9",
        "Ten blocks of four tokens, three requests. Watch the order of the queue: what was released longest ago is "
        "taken first, and of one request its last block first. The last two steps play it again in the engine's order.",
    ),
    Scene(
        "One system prompt, four requests",
        "/n4g3e4",
        "All four begin with the same twelve words: three blocks, computed once, then found. Each gets three words of "
        "an answer; then they end one after another.",
    ),
    Scene(
        "What is evicted first",
        f"m2/t({KEEPER} and stay polite who lights the lamp at night)et({TRAIN})e"
        f"t({KEEPER} and stay polite how far does the light reach)et({BREAD})et({LAMPS})e"
        f"t({KEEPER} and stay polite who lights the lamp in winter when it snows)e",
        "A pool of 8 blocks. Requests with the system prompt and strangers take turns, and each ends before the next "
        "one comes. Cached blocks are evicted when they reach the head of the queue.",
    ),
    Scene(
        "Two blocks, one hash",
        "/t(how far does the light reach)t(how far does the light reach)g4",
        "Two requests with the same text run side by side and get the same words. Both fill their second block at "
        "the same time, so there are two blocks under one hash.",
    ),
    Scene(
        "Salts keep tenants apart",
        f"/st({KEEPER})st({KEEPER})s2t({KEEPER})",
        "The same text from alice, from bob, and from alice again. Only the last one finds something.",
    ),
    Scene(
        "A picture in the prompt",
        f"/t({SEA} [boat] what is it)t({SEA} [gull] what is it)t({SEA} [boat] who is aboard)",
        "Two pictures after the same words, then a second question about the first. Each becomes six placeholders with "
        "the same id, so only the extra keys tell the pictures apart. The pool shows which picture its "
        "K and V are of. Type a picture of your own as a word in brackets.",
    ),
    Scene(
        "Trap 1: tokens hashed without their parent",
        f"f/t({JAPAN} {BOTH})t({READER} thank you)t({READER} {BOTH})",
        "A block's hash is made of its own tokens only. The third request finds a block that was computed after a "
        "different beginning.",
    ),
    Scene(
        "Trap 2: bytes(token_ids)",
        "f2/n",
        "bytes() takes numbers up to 255, and token ids are larger. This fault at least is loud.",
    ),
    Scene(
        "Trap 3: references stay raised",
        f"m2f3/n3e2t({BOTH} and I like to read in the evening when the lamp is lit at last)",
        "A request that does not fit is refused, and its hits keep the references that were taken for it. When all "
        "have ended, blocks are lost: nobody holds them, and they are not in the queue.",
    ),
    Scene(
        "Trap 4: hits left in the free queue",
        "m2f4/nen3",
        "A hit gets a reference and stays in the queue. So it is taken a second time, for another text, while a "
        "request still uses it.",
    ),
    Scene(
        "Trap 5: hashes stay",
        f"m2f5w3/t({JAPAN} {BOTH})enenenet({JAPAN} {BOTH})",
        "A block that is taken for new content keeps its entry in the hash map. The first text comes again, and finds "
        "the K/V of another one.",
    ),
    Scene(
        "Trap 6: nothing left to compute",
        f"f6/t({KEEPER} thank you)t({KEEPER} thank you)g",
        "All of a fully cached prompt counts as computed. Then no position is computed, and there are no logits to "
        "choose the next word from.",
    ),
]
