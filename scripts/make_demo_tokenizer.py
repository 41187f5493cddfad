#!/usr/bin/env python3
"""Make the tokenizer of the demo checkpoint: a small byte-level BPE with the special tokens and ids of Qwen2.5-VL.

    python scripts/make_demo_tokenizer.py [tokenizer.json]

The demo needs a tokenizer that behaves like the real one but ships with the package: about 2500 tokens, learnt from
the text in this file. The result is the same on every run.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TARGET = Path(__file__).parent.parent / "src/pixelgate/demo/checkpoint/tokenizer.json"
LEARNT = 2500
SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
# How Qwen cuts text into words before merging: contractions, words with the mark before them, single digits,
# runs of punctuation, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def train(learnt: int = LEARNT) -> Tokenizer:
    """Learn ``learnt`` tokens from the text below (256 of them are the single bytes) and add the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _with_words(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(vocab_size=learnt, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text(), trainer)

    # Special tokens added to a trained tokenizer get the next free ids. To have Qwen's, with a gap before them, they
    # must be in the vocabulary already. No merge leads to them, so text cannot become one.
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = _with_words(Tokenizer(models.BPE(vocab=model["vocab"] | SPECIAL, merges=merges)))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    return tokenizer


def _with_words(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


WORD_LISTS = """\
red orange yellow green blue purple brown black white grey pink silver golden dark light

small large tall short wide narrow round square long thin heavy empty bright broken old new

apple bag ball banana basket bench bicycle bird board boat book bottle bowl box bread bridge bus button cake
camera candle car card carpet cat chair clock cloud coat coffee computer cow cup curtain desk dog door dress
engine envelope face fence field fish flag floor flower fork garden gate glass guitar hand hat hill horse house
invoice jacket kettle key keyboard kitchen knife ladder lake lamp leaf letter lorry map market menu mirror
monitor moon mountain mouse newspaper notebook office orange page painting paper park pen pencil person phone
photograph piano picture pillow pipe plant plate pocket poster printer queue receipt ribbon ring river road rock
roof room rope sail scarf screen sea sheep shelf ship shirt shoe shop sign sky snow sofa spoon stairs stamp star
station stone street sun table tablet tap tea telephone tent ticket towel tower toy tractor train tray tree
truck umbrella van vase village wall watch water wheel window wood yard

above across along among around at behind below beside between beyond in inside near on opposite outside over
past through towards under with without

artist baker boy builder cashier child clerk cook customer doctor driver farmer father friend girl guest guide
man mother nurse painter photographer player runner sailor singer student teacher tourist waiter woman worker
writer

bringing building buying calling carrying catching cleaning closing counting cutting drawing drinking driving
eating feeding fixing following holding hiding lifting looking making measuring moving opening ordering packing
painting pointing pulling pushing reading riding selling showing sitting sleeping standing taking talking
throwing touching turning waiting walking washing watching wearing writing

zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million

Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow yesterday

January February March April May June July August September October November December

Bread Butter Milk Cheese Coffee Tea Sugar Apples Bananas Tomatoes Rice Pasta Soap Paper Batteries Water
"""
COLOURS, SIZES, THINGS, PLACES, PEOPLE, DOING, NUMBERS, DAYS, MONTHS, GOODS = (
    words.split() for words in WORD_LISTS.split("\n\n")
)

SENTENCES = """
user system assistant tool: the system message comes first, the user asks, the assistant answers.
You are a helpful assistant that looks at pictures and answers questions about them.
Describe this image. What do you see in the picture? What is shown here?
Describe the image in detail. Please describe what is in this photograph.
What does the sign say? Read the text in the image aloud, line by line.
How many people are there? Count the objects on the table and give only the number.
Which of the two pictures is brighter? Compare the first image with the second image.
Is there anything unusual in this picture? Explain your answer in one sentence.
Where was this photograph taken? The buildings and the trees suggest a small town by the sea.
The image shows a wide street with shops on both sides and a clock tower at the far end.
In the foreground there is a wooden bench; in the background we can see mountains covered with snow.
On the left side of the picture stands a tall lamp, on the right side a narrow door is half open.
At the top of the page is a title, below it a table with three columns, and at the bottom a page number.
The picture was taken in the evening, because the shadows are long and the light is warm.
I can see a person with an umbrella. The umbrella is the only thing with a strong colour.
The text reads: closed on Sundays and public holidays. Please use the other entrance.
The receipt lists four items, a subtotal, the tax and the total, which was paid by card.
The total amount is at the bottom of the receipt. The date and the time are printed in the first line.
This invoice was issued in March and is due within thirty days. The number is in the upper right corner.
I cannot read the last line, because the paper is folded there and the letters are blurred.
The chart has a horizontal axis for time and a vertical axis for temperature, with a line for every city.
The highest value is reached in July, the lowest in January; the average over the year is about twelve degrees.
The diagram shows how a request goes from the client to the gateway and from there to the engine.
A gateway receives a message with images, prepares the tensors and sends them on to an inference engine.
A picture is cut into patches, every patch becomes a row of numbers, and the model reads the rows as tokens.
The larger the image, the more tokens it needs. A very large image is made smaller before it is cut.
The processor resizes the image to a multiple of the patch size, then rescales and normalizes its pixels.
The screen shows an error message: the file could not be found. Check the name and try again.
The map marks the railway station with a red dot. The museum is two streets to the north of it.
Yes, there is. No, there is not. I am not sure. It looks like it, but I would not rely on it.
It's a photo that doesn't show much: they're waiting, we've seen it, I'd say she'll come and I'm sure he won't.
Thank you for the question! Here is what I found: the answer is in the second paragraph.
First, look at the corner of the room. Second, follow the line on the floor. Finally, count the windows.
The answer is correct. The answer is wrong. The statement is true. The statement is false.
Warning: high voltage. Keep out. Exit only. No parking. Mind the step. Push. Pull. Open. Closed. Sale. Stop.
Caution, wet floor. Please do not touch. Staff only. Way out. Tickets and information. Platform four. Gate seven.
Best before the end of the month. Store in a cool and dry place. Shake well before use. Made from recycled paper.
Height, width, depth, weight, length, area, volume, distance, speed, temperature, pressure, price and quantity.
The first, the second, the third, the fourth, the fifth, the sixth, the seventh, the eighth, the ninth, the tenth.
Left, right, top, bottom, middle, centre, corner, edge, front, back, near, far, north, south, east and west.
Circle, triangle, rectangle, square, line, point, curve, arrow, cross, star, pattern, stripe, shadow and reflection.
Breakfast is served from half past six to ten. Lunch is from noon to two. The kitchen closes at nine in the evening.
Soup of the day, mixed salad, grilled fish with potatoes, vegetable curry, apple cake with cream, coffee and tea.
The handwriting is hard to read, yet the signature at the end is clear. The letter was written with a blue pen.
The label on the bottle says that it contains half a litre. The price tag next to it is yellow.
The photograph is black and white, slightly out of focus, and scratched along its left edge.
Someone has drawn a face on the wall with chalk. Nobody is in the room. Everything else is in its place.
The sky is clear above the harbour, and several boats are tied to the quay. Their names are painted on the side.
Before the crossing there is a traffic light, after it a roundabout. The speed limit is thirty.
If you would like more details, tell me which part of the image you mean, and I will describe it again.
assistant user assistant user.
As an answer, give a list. As a list, give one item on each line. Do not add anything that is not in the picture.
"""

CODE = """
def area(height: int, width: int) -> int:
    return height * width

for index, image in enumerate(images):
    print(index, image.size, image.mode)

if value is None or value < 0:
    raise ValueError("the value must not be negative")

import json
from pathlib import Path

class Picture:
    def __init__(self, name, pixels):
        self.name = name
        self.pixels = pixels

with open("picture.png", "rb") as file:
    data = file.read()

const total = items.map((item) => item.price).reduce((sum, price) => sum + price, 0);
function main() { return items.length > 0 ? items[0] : null; }
SELECT name, price FROM items WHERE price > 100 ORDER BY name;
<html><head><title>Page</title></head><body><p class="text">Hello, world!</p><img src="photo.jpg"/></body></html>
{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": true, "max_tokens": 100}
{"type": "image_url", "image_url": {"url": "https://example.com/photo.jpg"}}, {"type": "text", "text": "Describe"}
{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "", "unit": "celsius"}}}
GET /v1/models HTTP/1.1 200 OK; POST /v1/chat/completions; http://localhost:8000; name@example.com; www.example.org
# Title\n\n## Section\n\n- first\n- second\n\n1. one\n2. two\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n**bold** `code`
a += 1; b -= 2; c *= 3; d /= 4; x == y; x != y; x >= y; x <= y; x && y; x || y; !x; x -> y; x => y; (x); [x]; {x};
try: ... except Exception as error: ... finally: ... # comment // comment /* comment */ <!-- comment -->
"""


def text() -> Iterator[str]:
    """The training text. Counters stand in for chance: every word comes up in many sentences, in a fixed order."""
    yield from itertools.repeat(SENTENCES + CODE, 12)
    for i, thing in enumerate(THINGS):
        other = THINGS[(7 * i + 3) % len(THINGS)]
        colour, size = COLOURS[i % len(COLOURS)], SIZES[i % len(SIZES)]
        person, doing = PEOPLE[i % len(PEOPLE)], DOING[i % len(DOING)]
        number, place = NUMBERS[i % len(NUMBERS)], PLACES[i % len(PLACES)]
        day, month = DAYS[i % len(DAYS)], MONTHS[i % len(MONTHS)]
        yield f"There is a {size} {colour} {thing} {place} the {other}. The {person} is {doing} the {thing}.\n"
        yield f"Which {thing} is it? It is number {number}, the one {place} the {colour} {other}.\n"
        yield f"{thing.capitalize()} {i % 31 + 1} {month}: {number} {person}s were {doing} a {size} {other} {day}.\n"
        yield f"{person.capitalize()}, {colour.capitalize()} {thing.capitalize()}, {doing} the {other} on {day}.\n"
        good, price = GOODS[i % len(GOODS)], f"{i * 7 % 40}.{i * 35 % 100:02}"
        yield f"{good}   {i % 4 + 1} x {price} EUR\nTOTAL  {price} EUR\nVAT {i % 25}%  No. {1000 + 37 * i}\n"
        yield f"{good} {place} {colour} {size} {day}".upper() + f" {price} USD {i % 24}:{i % 60:02}\n"


def main() -> None:
    """Write the tokenizer to the path given, or into the demo checkpoint."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    tokenizer = train()
    tokenizer.save(str(target), pretty=False)
    print(f"{target}: {tokenizer.get_vocab_size()} tokens, {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
