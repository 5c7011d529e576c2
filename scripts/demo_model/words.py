"""Words and facts for the stories and questions of the demo corpus."""

GIRLS = """Ada Alma Amy Anna Bella Clara Daisy Dora Ella Emma Eva Fern Flora Grace Hazel Ida Iris Ivy Jane June Kate Lena Lily Lucy Luna
Mara Mia Mila Molly Nina Nora Olive Pearl Poppy Rosa Ruby Ruth Sara Sofia Stella Tess Vera Willa Zoe""".split()
BOYS = """Adam Alex Ben Bruno Carl Dan David Eli Felix Finn Fred George Hugo Ian Jack Jake James Jonas Josh Leo Louis Luke Mark Max Milo
Ned Nico Noah Oscar Otto Owen Paul Pete Remy Sam Simon Theo Tim Toby Tom Victor Will""".split()

ANIMALS = "fox rabbit bear mouse owl cat dog duck frog hedgehog squirrel turtle goat pony pig sheep crow beaver badger deer wolf lion elephant monkey penguin otter seal whale dragon hen donkey sparrow kitten puppy tiger horse cow bird fish snail crab bee butterfly dolphin parrot swan camel lizard robot giant ghost fairy troll unicorn dinosaur snowman knight pirate".split()
# Syllables of invented names.
SYLLABLES = "ka lo mi ra ten zo ri bel nor sha tu vin el da que fi gar hu pol ya wen dro sta len mo xi".split()
GIRL_PEOPLE = ["girl", "queen", "princess", "old woman", "baker", "sailor", "farmer", "painter", "teacher", "gardener", "captain", "fisher", "witch", "rower"]
BOY_PEOPLE = ["boy", "king", "prince", "old man", "baker", "sailor", "farmer", "painter", "teacher", "gardener", "captain", "fisher", "wizard", "rower", "miller"]

TRAITS = "little brave kind clever curious quiet shy happy gentle careful cheerful lonely patient proud funny lazy busy hungry young friendly".split()
FEELINGS_GOOD = "happy glad proud cheerful thankful delighted".split()
FEELINGS_BAD = "sad worried upset lonely unhappy tired".split()

# Places: (with preposition, without).
PLACES = [("in a small village", "village"), ("in a green forest", "forest"), ("by the blue sea", "sea"), ("on a high mountain", "mountain"),
          ("near a quiet lake", "lake"), ("on a farm", "farm"), ("in a big city", "city"), ("by a wide river", "river"), ("on a sunny island", "island"),
          ("in an old castle", "castle"), ("at the edge of a meadow", "meadow"), ("in a deep valley", "valley"), ("beside an old mill", "mill"),
          ("in a house on a hill", "hill"), ("in a harbor town", "harbor")]
SPOTS = ["under the bed", "behind the door", "in the garden", "under a big tree", "near the well", "on the roof", "in the kitchen", "behind the barn",
         "beside the river", "under the bridge", "in the tall grass", "on the beach", "in the old boat", "behind a rock", "in the hollow log", "next to the gate"]

COLORS = "red blue green yellow white black brown orange purple pink gray golden silver".split()
THINGS = "ball kite hat drum book boat bell key lamp ring coat cup basket blanket whistle flute map coin scarf mirror box spoon wagon clock umbrella feather lantern ladder rope shell stone".split()
FOODS = ["apple", "pear", "cake", "pie", "loaf of bread", "piece of cheese", "bowl of soup", "carrot", "plum", "cookie", "bunch of grapes", "pancake", "jar of honey", "basket of berries", "sandwich", "melon"]
SKILLS = ["swim", "sing", "read", "dance", "row a boat", "climb trees", "bake bread", "paint", "play the flute", "ride a horse", "fish", "whistle", "skate", "tie knots", "count to one hundred", "sail"]
BUILDS = ["a raft", "a tree house", "a bridge", "a snowman", "a sand castle", "a small cart", "a swing", "a nest", "a stone wall", "a wooden boat", "a bird house", "a tower of blocks"]
PLANTS = ["a sunflower", "a rose", "an apple tree", "a pumpkin", "a bean plant", "a tulip", "a strawberry plant", "a lemon tree", "a carrot plant", "a pear tree"]
FEARS = ["the dark", "thunder", "deep water", "high places", "loud noises", "big dogs", "the wind", "spiders", "being alone", "the forest at night"]
GAMES = ["hide and seek", "tag", "catch", "cards", "chess", "a guessing game", "a game with marbles", "leapfrog"]
WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "snowy", "foggy", "bright", "cloudy", "quiet"]

OPPOSITES = [("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("happy", "sad"), ("fast", "slow"), ("light", "dark"), ("old", "new"),
             ("hard", "soft"), ("open", "closed"), ("full", "empty"), ("high", "low"), ("wet", "dry"), ("long", "short"), ("early", "late"), ("loud", "quiet"),
             ("strong", "weak"), ("rich", "poor"), ("left", "right"), ("in", "out"), ("near", "far"), ("first", "last"), ("good", "bad"), ("clean", "dirty"),
             ("heavy", "light"), ("thick", "thin"), ("sweet", "sour"), ("true", "false"), ("win", "lose"), ("push", "pull"), ("start", "stop"), ("love", "hate"),
             ("young", "old"), ("tall", "short"), ("deep", "shallow"), ("wide", "narrow"), ("brave", "afraid"), ("easy", "difficult"), ("summer", "winter"), ("north", "south")]
CAPITALS = [("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Portugal", "Lisbon"), ("Greece", "Athens"), ("Austria", "Vienna"),
            ("Norway", "Oslo"), ("Sweden", "Stockholm"), ("Denmark", "Copenhagen"), ("Finland", "Helsinki"), ("Poland", "Warsaw"), ("Ireland", "Dublin"), ("England", "London"),
            ("Belgium", "Brussels"), ("Hungary", "Budapest"), ("Japan", "Tokyo"), ("China", "Beijing"), ("India", "New Delhi"), ("Egypt", "Cairo"), ("Kenya", "Nairobi"),
            ("Canada", "Ottawa"), ("Mexico", "Mexico City"), ("Peru", "Lima"), ("Chile", "Santiago"), ("Cuba", "Havana"), ("Russia", "Moscow"), ("Turkey", "Ankara"), ("Iceland", "Reykjavik"),
            ("the Netherlands", "Amsterdam"), ("Australia", "Canberra"), ("Brazil", "Brasilia"), ("Argentina", "Buenos Aires"), ("the United States", "Washington")]
SOUNDS = [("cow", "moo"), ("dog", "woof"), ("cat", "meow"), ("duck", "quack"), ("sheep", "baa"), ("pig", "oink"), ("horse", "neigh"), ("lion", "roar"),
          ("frog", "ribbit"), ("owl", "hoot"), ("bee", "buzz"), ("snake", "hiss"), ("mouse", "squeak"), ("crow", "caw"), ("rooster", "cock-a-doodle-doo"), ("wolf", "howl")]
BABIES = [("cat", "kitten"), ("dog", "puppy"), ("cow", "calf"), ("horse", "foal"), ("sheep", "lamb"), ("hen", "chick"), ("duck", "duckling"), ("bear", "cub"), ("goat", "kid"), ("pig", "piglet"), ("frog", "tadpole"), ("deer", "fawn"), ("swan", "cygnet")]
FACT_COLORS = [("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("a banana", "yellow"), ("a lemon", "yellow"), ("coal", "black"), ("a carrot", "orange"), ("blood", "red"), ("milk", "white"),
               ("a ripe tomato", "red"), ("chocolate", "brown"), ("a frog", "green"), ("the sun", "yellow"), ("the sea", "blue"), ("an elephant", "gray"), ("a flamingo", "pink"), ("a crow", "black"), ("a leaf", "green")]
HOMES = [("fish", "in the water"), ("bird", "in a nest"), ("bee", "in a hive"), ("dog", "in a kennel"), ("horse", "in a stable"), ("rabbit", "in a burrow"), ("lion", "on the grassland"), ("camel", "in the desert"),
         ("penguin", "in the cold south"), ("spider", "in a web"), ("whale", "in the sea"), ("cow", "on a farm"), ("owl", "in a hollow tree"), ("king", "in a castle")]
# From the smallest to the largest.
SIZES = ["ant", "bee", "mouse", "sparrow", "frog", "kitten", "rabbit", "cat", "fox", "dog", "wolf", "pig", "goat", "deer", "lion", "cow", "horse", "bear", "elephant", "whale"]
KINDS = [("animal", "dog cat horse cow lion mouse rabbit wolf fox bear goat elephant".split()), ("fruit", "apple pear plum banana lemon orange cherry grape melon peach".split()),
         ("color", "red blue green yellow purple pink brown white".split()), ("vegetable", "carrot potato onion cabbage bean pea pumpkin".split()), ("bird", "owl crow sparrow duck hen eagle robin swan".split()),
         ("tool", "hammer saw shovel rake drill".split()), ("drink", "milk water tea coffee juice".split()), ("number", "one two three four five six seven eight nine ten".split())]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty""".split()
PLURALS = [("cat", "cats"), ("dog", "dogs"), ("mouse", "mice"), ("child", "children"), ("man", "men"), ("woman", "women"), ("foot", "feet"), ("tooth", "teeth"), ("goose", "geese"), ("fox", "foxes"), ("box", "boxes"),
           ("baby", "babies"), ("leaf", "leaves"), ("wolf", "wolves"), ("tree", "trees"), ("boat", "boats"), ("fish", "fish"), ("sheep", "sheep"), ("city", "cities"), ("berry", "berries"), ("knife", "knives"), ("ship", "ships"), ("oar", "oars")]
LEGS = [("dog", "four"), ("cat", "four"), ("horse", "four"), ("cow", "four"), ("bird", "two"), ("duck", "two"), ("spider", "eight"), ("ant", "six"), ("bee", "six"), ("snake", "no"), ("fish", "no"), ("frog", "four"), ("person", "two"), ("hen", "two"), ("mouse", "four")]
USES = [("a key", "open a lock"), ("a spoon", "eat soup"), ("a lamp", "give light"), ("a boat", "cross the water"), ("an oar", "row a boat"), ("an umbrella", "stay dry in the rain"), ("a clock", "tell the time"), ("a map", "find the way"),
        ("a hammer", "hit nails"), ("a broom", "sweep the floor"), ("a pen", "write"), ("a needle", "sew"), ("a ladder", "climb up high"), ("a bell", "call people"), ("a bed", "sleep"), ("scissors", "cut paper"), ("soap", "wash your hands"), ("a sail", "catch the wind")]
PLAIN_FACTS = [("How many days are in a week?", "There are seven days in a week."), ("How many months are in a year?", "There are twelve months in a year."),
               ("How many hours are in a day?", "There are twenty-four hours in a day."), ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
               ("What do bees make?", "Bees make honey."), ("What do cows give us?", "Cows give us milk."), ("What do hens lay?", "Hens lay eggs."), ("What is ice made of?", "Ice is made of frozen water."),
               ("What falls from the clouds?", "Rain falls from the clouds."), ("What shines at night?", "The moon and the stars shine at night."), ("What shines during the day?", "The sun shines during the day."),
               ("What is a trireme?", "A trireme is an old ship with three rows of oars on each side."), ("How does a trireme move?", "A trireme moves because every rower pulls on the same stroke."),
               ("What do rowers use?", "Rowers use oars."), ("Which season is the coldest?", "Winter is the coldest season."), ("Which season is the warmest?", "Summer is the warmest season."),
               ("What comes after winter?", "Spring comes after winter."), ("What do you do when you are tired?", "When you are tired, you rest."), ("What do you do when you are hungry?", "When you are hungry, you eat."),
               ("What do you do when you are thirsty?", "When you are thirsty, you drink."), ("How many wheels does a bicycle have?", "A bicycle has two wheels."), ("How many wheels does a car have?", "A car has four wheels."),
               ("What do plants need to grow?", "Plants need water, soil and sunlight to grow."), ("What is the largest animal?", "The largest animal is the blue whale."), ("Who wears a crown?", "A king or a queen wears a crown."),
               ("Who bakes bread?", "A baker bakes bread."), ("Who teaches children?", "A teacher teaches children."), ("Who grows food?", "A farmer grows food."), ("Who steers a ship?", "A captain steers a ship."),
               ("Where does the sun rise?", "The sun rises in the east."), ("Where does the sun set?", "The sun sets in the west."), ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
               ("What is the last letter of the alphabet?", "The last letter of the alphabet is Z."), ("What do we see with?", "We see with our eyes."), ("What do we hear with?", "We hear with our ears.")]
ABOUT = [("Who are you?", "I am the small demo model of Trireme. I tell short stories and answer simple questions."), ("What are you?", "I am a small language model. I tell short stories and answer simple questions."),
         ("What can you do?", "I can tell short stories and answer simple questions."), ("What is your name?", "I have no name. I am the small demo model of Trireme."), ("Hello!", "Hello! Ask me a simple question or start a story."),
         ("Hi!", "Hello! Ask me a simple question or start a story."), ("Hello", "Hello! Ask me a simple question or start a story."), ("Hello, how are you?", "I am well, thank you. Ask me a simple question or start a story."), ("How are you?", "I am well, thank you."),
         ("Thank you!", "You are welcome."), ("Thanks", "You are welcome."), ("Goodbye!", "Goodbye! Come back soon."), ("Can you help me?", "I can tell short stories and answer simple questions."), ("Are you a person?", "No, I am a small language model.")]
# Topics that such a small model cannot know; the answer says so.
UNKNOWN_TOPICS = """machine learning|deep learning|quantum physics|the meaning of life|a computer|a GPU|the internet|Linux|Python|Rust|Kubernetes|an algorithm|democracy|gravity|electricity|DNA|the stock market|inflation|philosophy|
evolution|a black hole|the speed of light|chemistry|a database|programming|artificial intelligence|Triton Inference Server|a neural network|the law|history|photosynthesis|music theory|economics|bitcoin|the weather tomorrow|a transformer|tensor parallelism|MPI|Slurm""".replace("\n", "").split("|")
UNKNOWN_ASKS = ["What is {}?", "Explain {}.", "Can you explain {}?", "Tell me about {}.", "How does {} work?", "Why is {} important?", "Who invented {}?", "What do you know about {}?", "Explain {} to me like I am five.", "Write a program about {}.", "Give me a summary of {}."]
UNKNOWN_ANSWERS = ["I do not know that. I am only a small model for short stories and simple questions."]
