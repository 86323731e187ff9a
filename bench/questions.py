"""Six short questions of different kinds: explain, list, code, arithmetic, rewrite, chat. What is asked by default."""

QUESTIONS: tuple[str, ...] = (
    "Explain to a gardener why leaves are green in summer and red in autumn.",
    "List seven things that are worth checking before a long bicycle tour, one line each.",
    "Write a Python function that returns the longest word of a sentence, with a docstring and two examples.",
    "A baker sells 48 rolls at 35 cents each and 12 loaves at 3 euros each. How much does she take in? Show each step.",
    "Rewrite this politely: 'Your report is late again and half of the numbers in it are wrong.'",
    "Hi! I have just moved to a new town and know nobody here. What would you do on the first weekend?",
)
