"""What can happen to the bytes of a file."""


def flip(content, random_):
    content = bytearray(content)
    for _ in range(random_.choice([1, 1, 1, 2, 5])):
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    return bytes(content)


def cut(content, random_):
    return content[: random_.randrange(len(content))]


def lengthen(content, random_):
    return content + random_.randbytes(random_.choice([1, 8, 100]))


def overwrite(content, random_):
    start = random_.randrange(len(content))
    length = random_.randrange(1, 64)
    other = random_.choice([bytes(length), random_.randbytes(length)])
    return (content[:start] + other + content[start + length :])[: len(content)]


def swap(content, random_):
    i, j = sorted(random_.sample(range(0, len(content) - 8, 8), 2))
    return (
        content[:i]
        + content[j : j + 8]
        + content[i + 8 : j]
        + content[i : i + 8]
        + content[j + 8 :]
    )


def remove(content, random_):
    start = random_.randrange(len(content))
    return content[:start] + content[start + random_.randrange(1, 16) :]


ACCIDENTS = (flip, flip, flip, cut, lengthen, overwrite, swap, remove)
