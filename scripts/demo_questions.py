"""Questions of many kinds, for the conversations that the demo's draft is trained on: what a target asks itself is
mostly small talk, hardly ever code, sums or a text to shorten. Made of pieces written here; none is of a benchmark.
Half of them are only begun: the target ends those itself.

    python -m scripts.demo_questions > questions.jsonl
"""

import json
import random

COUNT = 12000

FORMS = """Write a short story about {}.|Write a poem about {}.|Explain {} to a ten-year-old child.|What is {}?
Give me five tips on {}.|What are the advantages and disadvantages of {}?|Write an email to a colleague about {}.
Describe the history of {}.|Write a blog post about {}.|How does {} change everyday life?|List three facts about {}.
Write a persuasive paragraph in favour of {}.|Imagine you are an expert on {}. What would you tell a beginner?
Compare {} with {}.|Make an outline of a talk about {}.|Write a dialogue between two friends about {}.
What questions should I ask before I decide on {}?|Invent a slogan and a short advertisement for {}.
Translate this sentence into French: "I would like to learn more about {}."|Write a news report about {}.
Plan a weekend around {}.|Is {} worth the money?|What would the world be like without {}?|Explain how {} works.
Rewrite this sentence so that it sounds friendlier: "You know nothing about {}."|Draft a speech on {} for a school.
Give step-by-step instructions for someone who starts with {}.|Classify these by size: {}, {}, {}.
Write a product review that mentions {}.|Suggest a title for a book about {} and {}.|Act as a critic of {}."""

TOPICS = """solar power|online banking|the Roman Empire|bread baking|electric bicycles|black holes|a balcony garden
the stock market|volcanoes|learning the violin|remote work|the immune system|chess|recycling plastic|photosynthesis
marathon training|the printing press|artificial intelligence|coffee|earthquakes|public libraries|cloud computing
Antarctica|inflation|jazz|vaccines|space telescopes|a gap year|meditation|the French Revolution|bees|time management
cryptography|whales|a family budget|nuclear fusion|the Silk Road|street photography|dinosaurs|healthy breakfasts
the water cycle|job interviews|renewable energy|medieval castles|pottery|DNA|open-source software|sleep|tides|democracy
robots in hospitals|mountain hiking|the Great Wall of China|supply and demand|gravity|film music|high-speed trains
rainforests|learning a second language|data privacy|ancient Egypt|houseplants|3D printing|the theory of evolution
a new phone|my neighbour's dog|a broken friendship|moving to a new city|the minimum wage|a lost key|acids and bases
linear algebra|probability|the Cold War|trade between nations|a detective|a dragon|a talking tree|life on Mars|a king
binary search|hash tables|a web server|regular expressions|a to-do list app|a restaurant review|a customer's complaint
a quarterly report|a birthday party|a wedding|grammar|metaphors|Shakespeare|impressionist painting|opera|football
swimming|vegetarian food|a chocolate cake|blood pressure|vitamins|the heart|the brain|headaches|stress|a sore throat
magnets|lightning|the speed of light|atoms|plate tectonics|the ozone layer|deserts|rivers|elephants|penguins|spiders
the United Nations|elections|taxes|insurance|mortgages|bankruptcy|antitrust law|copyright|human rights|privacy
monetary policy|globalization|poverty|gender equality|social media|advertising|leadership|teamwork|negotiation
a superhero|a time machine|a haunted house|a ship in a storm|a small village|two sisters|an old clock|the first snow
Paris|Tokyo|New York|India|Brazil|Kenya|the Pacific Ocean|the Moon|Mount Everest|the Sahara|the Vikings|the samurai
Albert Einstein|Marie Curie|Leonardo da Vinci|Napoleon|Cleopatra|Gandhi|Mozart|Isaac Newton|Queen Victoria|Plato"""

ASKED = """who invented the {}|when was the {} invented|where was the first {} built|what is a {} made of
why is a {} useful|how many parts does a {} have|who first used a {} in war|what does a {} cost|how big is a {}
what country makes the best {}|which company sold the first {}|what came before the {}|who wrote a book about the {}"""

THINGS = """telephone|steam engine|compass|microscope|piano|submarine|typewriter|parachute|zipper|camera|refrigerator
telescope|battery|radio|windmill|bicycle|elevator|lighthouse|printing press|helicopter|guitar|umbrella|thermometer"""

SUMS = """{A} has {m} boxes with {n} apples each and gives {k} apples away. How many apples are left?
A train goes {n} miles an hour for {m} hours and then {k} more miles. How far does it go in all?
{A} earns ${n} a day and works {m} days a week. How much does {A} earn in {k} weeks?
A shop sells a shirt for ${n} and a hat for ${k}. {A} buys {m} shirts and one hat. How much does {A} pay?
{A} reads {k} pages a day. How many days does a book of {n} pages take, and {m} such books?
There are {n} students in {m} rooms, and {k} more come. How many are there in each room if all rooms are alike?
What is {n} times {m}, minus {k}?|{A} is {k} years old and {B} is {m} times as old. How old are they together?
{A} saves {k}% of ${n} each month. How much is that after {m} months?|Solve for x: {m}x + {k} = {n}.
If a rectangle is {m} cm wide and {n} cm long, what are its area and its perimeter?
{A} and {B} share {n} sweets so that {A} gets {k} more than {B}. How many does each get?"""

CODE = """count_vowels(text: str) -> int:Count the vowels in text.|reverse_words(text: str) -> str:Reverse the words.
swap_case(text: str) -> str:Make capitals small and small letters capital.|gcd(a: int, b: int) -> int:Greatest divisor.
clamp(x: float, low: float, high: float) -> float:Keep x between low and high.|last(values: list, n: int) -> list:Tail.
pairs(values: list, total: int) -> list:Find the pairs that add up to total.|is_leap(year: int) -> bool:A leap year?
squares(n: int) -> list:Return the first n square numbers.|title(text: str) -> str:Begin each word with a capital.
zip_sum(a: list, b: list) -> list:Add two lists, one by one.|minutes(text: str) -> int:Minutes of a time like 12h30.
chunks(values: list, n: int) -> list:Cut a list into pieces of n.|caesar(text: str, k: int) -> str:Shift letters by k.
bubble_sort(values: list) -> list:Sort by swapping neighbours.|power(x: float, n: int) -> float:x to the n-th.
is_prime(n: int) -> bool:Tell whether n is a prime number.|flatten(rows: list) -> list:Make one list of a list of lists.
merge(a: list, b: list) -> list:Merge two sorted lists into one.|factorial(n: int) -> int:Return the factorial of n.
running_sum(values: list) -> list:Return the sums of all prefixes.|unique(values: list) -> list:Drop what came before.
to_binary(n: int) -> str:Write n in binary digits.|common(a: str, b: str) -> str:Return the letters found in both.
mean(values: list) -> float:Return the mean of the values.|rotate(values: list, k: int) -> list:Rotate by k places.
digits(n: int) -> int:Return the sum of the digits of n.|longest(words: list) -> str:Return the longest of the words.
fib(n: int) -> int:Return the n-th Fibonacci number.|transpose(rows: list) -> list:Swap rows and columns.
second_largest(values: list) -> int:Return the second largest value.|is_sorted(values: list) -> bool:Is it ascending?
remove_spaces(text: str) -> str:Remove all spaces.|histogram(text: str) -> dict:Count each character in text."""

BEGINNINGS = """Who|who was the first|When did|when was|Where is|where does the name|What is the name of|how many
which|What year did|In which country|Who wrote|who played|who sang|what does it mean when|how long does it take to
where was|Which of these is|when does|what happened to|who is the author of|what type of|where do|A farmer has
Anna buys|If a train leaves|A baker sells|There are|Tom is twice as|In a class of|What is the sum of|The price of
Find the value of|How much does|A tank holds|Calculate|The ratio of|Half of|Write a Python function that
Complete this function:\\n\\ndef|Implement a|Given a list of|Write a program that|Finish:\\n\\ndef
What does this code do?\\n\\n|Write an SQL query|def|Explain this error:|Write a C++ program
Complete the code:\\nfrom typing import List\\n\\ndef|Imagine you are|Act as|Pretend to be|Rewrite the following
Extract the|Given the following|Which word|Describe|Compose|Draft|Translate|Is it|Edit the following paragraph:
Identify|Read this passage and answer:|Why do|Should|Compare|Explain|Suppose|Evaluate the following|Can you|I want to
My|You are|Discuss|Name|Design|Create|Generate|Suggest|Classify|List|Give me|Tell me|Outline|Provide|Propose|Help me
What are the|What if|How would you|How does|Could you explain|In the year|Please
Summarize the following article.\\n\\n|Give the main points of this text: "The"""

ABOUT = """What is the relation between {} and|Write a paragraph on {} that|Explain {}, and|What would happen if {}
In {}, what|Describe a scene with {} in which|How can I use {} to|Give an example of {} that|Why is {}|Write about {} as
Think about {} and|Read this text about {} and answer the question.\\n\\n|Correct the grammar in this text on {}:
Write a sonnet about {},|Here is a list of facts about {}:|Who was most important to {}|When was {}|Is it true that {}
Write a letter to|As a teacher of {}, you|Solve this puzzle with {}:|Which of these belongs to {}:|Sort these by"""

NEWS = """Summarize: {}|Summarize: {}|Summarize: ({}) {}|Summarize: By a reporter. {}|Summarize: {}. Scroll down for
Summarize this article: {}|Summarize: {}, it was said on Monday"""

SUBJECTS = """A mother of three|Two teenagers|Police officers|Residents|The prime minister|A football manager|The singer
Researchers at a university|A judge|The airline|Firefighters|An 82-year-old man|Thousands of fans|An online shop
Doctors|The actor|A school teacher|The president|A former soldier|The club|A woman who lost her home|Rescuers|The mayor
The striker|A driver|A group of students|The supermarket|Officials|A scientist|The champion|The senator"""

EVENTS = """in Florida|from Manchester|in Sydney|who lives in Texas|in the north of France|from Chicago|near Moscow
at the weekend|in Lagos|from California|in Beijing|who was on holiday in Spain|in a small town in Ohio|in Glasgow"""

DONE = """had to|told the newspaper that|will face|said on Tuesday that|revealed how|claimed that|won|lost|refused to
may have discovered|could soon be|died when|asked|called for|found|won't be|returned|arrived|left|got|wanted to|made"""

TASKS = """Complete this function:\\n\\n{}|Write the body of this Python function.\\n\\n{}|Finish this code:\\n{}
Write a Python program that uses this function, and explain it step by step:\\n\\n{}|Write tests for this:\\n\\n{}"""


def pieces(text: str) -> list[str]:
    return [piece.replace("\\n", "\n") for line in text.splitlines() for piece in line.split("|")]


def stub(draw: random.Random) -> str:
    head, says = draw.choice(pieces(CODE)).rsplit(":", 1)
    return f'def {head}:\n    """ {says}\n    """\n'


def question(draw: random.Random) -> str:
    kind = draw.choices(("general", "asked", "sum", "code", "news", "about", "begun"), (24, 3, 5, 6, 14, 16, 32))[0]
    if kind == "general":
        return draw.choice(pieces(FORMS)).format(*draw.sample(pieces(TOPICS), 3))
    if kind == "asked":
        return draw.choice(pieces(ASKED)).format(draw.choice(pieces(THINGS))) + "?"
    if kind == "sum":
        A, B = draw.sample(("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo"), 2)
        return draw.choice(pieces(SUMS)).format(
            A=A, B=B, m=draw.randint(2, 9), n=draw.randint(20, 90), k=draw.randint(3, 19)
        )
    if kind == "code":
        return draw.choice(pieces(TASKS)).format(stub(draw))
    if kind == "news":
        begun = " ".join(draw.choice(pieces(part)) for part in (SUBJECTS, EVENTS, DONE))
        return draw.choice(pieces(NEWS)).replace("({})", draw.choice(("(CNN) --", "(London)"))).format(begun) + "..."
    if kind == "about":
        return draw.choice(pieces(ABOUT)).format(draw.choice(pieces(TOPICS))) + "..."
    return draw.choice(pieces(BEGINNINGS)) + "..."  # the target ends it


if __name__ == "__main__":
    draw = random.Random(0)
    for _ in range(COUNT):
        print(json.dumps({"turns": [question(draw)]}))
