"""The commonest words of languages that share a script, and letters that only one of them writes.

A word that two languages share is in both lists, so that it counts for neither.
"""

_WORDS = {
    "en": """
        the of and to a in is it you that he was for on are with as i his they be at one have
        this from or had by not but what all were we when your can said there use an each which
        she do how their if will up other about out many then them these so some her would make
        like him into has more my me no our who its been than just over also any only very after
        most because could should did where am don't it's i'm let's here us why does while such""",
    "es": """
        el la los las de del que y a en un una unos unas es por con no para su sus se lo como
        más pero al este esta estos estas está son ser fue ha han muy también si sin sobre entre
        cuando hay todo todos me mi mis tu tus te le les nos nuestro nuestra yo ella ellos o
        porque donde quien desde hasta puede pueden qué cómo era tiene sí ya hola gracias eso
        esto""",
    "pt": """
        o a os as de do da dos das que e em no na nos nas um uma uns umas é por com não para seu
        sua seus suas se como mais mas ao à aos este esta está são ser foi tem têm muito também
        sem sobre entre quando há todo todos me meu minha te lhe nosso nossa eu ela eles ou
        porque onde quem desde até pode podem pelo pela isso isto você já era então olá obrigado""",
    "fr": """
        le la les de du des que et à a en un une est par pour avec ne pas ce cette ces son sa
        ses se sur dans qui au aux plus mais ou où il elle ils elles nous vous je tu on sont
        être été ont avoir fait très aussi comme si sans entre quand tout tous toute mon ma mes
        ton ta leur leurs notre votre y lui même c'est donc car bonjour merci peut c d l n s j
        qu""",
    "de": """
        der die das und zu in ist den dem des von mit sich nicht auf für ein eine einen einem
        einer eines es als auch an im am werden wird aus er sie wir ihr ich du hat haben bei
        nach oder aber wie wenn dass daß so um nur noch über vor bis zum zur durch sind war
        waren kann können man mich mir dich dir uns unser mein dein sein seine ihre ihren was
        wer wo warum diese dieser dieses sehr mehr schon immer hallo danke""",
    "it": """
        il lo la i gli le di del della dei delle dello degli da dal dalla che e è a al alla ai
        in nel nella nei un uno una per con non su sul sulla si come più ma anche se sono essere
        ha hanno ho questo questa questi queste quello suo sua suoi loro molto tutto tutti ci mi
        ti vi o perché dove quando chi cosa era stato può possono noi io lei lui mio mia tra fra
        senza ed ciao grazie l d c dell all nell""",
    "pl": """
        i w z na do nie się że to jest o a jak po co tak za od ale przez dla są tym ten ta te
        tego tej być był była było może ze czy tylko już jego jej ich ja ty on ona my wy oni
        przy także które który która lub oraz więc gdy bardzo jestem mnie mi mu nas nam wszystko
        jako pod nad bez u ku dzień""",
    "vi": """
        và của là có các cho không được trong với một những người này để đã từ đến khi về như
        tôi bạn chúng ta cũng ra hay thì mà tại nên còn vì nếu đó sẽ rất nhiều làm vào trên phải
        hơn việc anh em họ nó gì đang do bởi bằng sau trước năm ngày cách ở lại""",
    "sw": """
        na ya wa kwa ni za la katika cha kuwa hii kama lakini pia watu hiyo wake yake yao wao
        sana au si huo huu hilo hili hayo haya hizi hizo vya mimi wewe yeye sisi nyinyi wetu
        yetu yangu yako wako zaidi kila mtu ambayo ambao ambaye baada kabla ili kwamba hata bila
        nini wapi je ndiyo hapana ndani juu chini mwa pamoja tu bado leo siku jinsi sababu nchi
        hivyo""",
    "fi": """
        ja on ei se että hän oli ovat olla en minä sinä me te he mutta kun niin myös kuin joka
        jos tai mitä tämä nyt jo vain ole oma sen hänen heidän minun sinun tämän joita jotka
        jonka vielä sitten siitä siellä tässä kanssa mukaan ennen jälkeen voi voit voivat sekä
        koska kaikki hyvin paljon olen olet olemme olisi niiden ne nämä mikä missä kuka miksi
        miten sitä""",
    "nl": """
        de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar bij door
        naar uit ik je hij zij ze we wij jij u hun haar heeft hebben had was waren wordt worden
        deze dit die wat wie waar hoe over tot of kan kunnen nog wel geen meer zo mijn jouw ons
        onze veel zou zal moet omdat""",
    "sv": """
        och att det som en ett i är på av för med den till inte om han hon har jag de så men var
        vi du man från kan när ska eller sig nu där efter vid hur vad mycket också alla detta
        denna dessa mig dig oss er sin sitt sina min mitt din ditt vara blev mer än bara bli
        utan mot genom många finns hade""",
    "tr": """
        ve bir bu da de için ile çok ne daha o ben sen biz siz onlar gibi kadar ama olarak var
        yok değil en her şey mi mı mu mü ki sonra önce olan oldu olduğu olur ise veya ya hem
        benim senin onun bizim bana sana ona nasıl neden şu diye içinde tüm bazı""",
    "id": """
        yang dan di ke dari untuk dengan ini itu tidak adalah pada dalam akan bisa dapat saya
        kamu anda kita kami mereka dia ada juga atau karena oleh sebagai telah sudah lebih
        seperti jika banyak orang hanya tetapi namun agar bagi para sangat kepada secara apa
        bagaimana""",
    "ro": """
        și de la în a cu pe nu este un o care să din mai că ce se sunt pentru al ai ale lui ei
        fi au am ai fost dar sau ca prin după foarte acest această aceste acesta între când cum
        unde eu tu el ea noi voi îi îl le mă te ne vă lor poate fără până tot toate""",
    "cs": """
        a v je na se že to s z do o i jsem jsou ve si za by pro ale jako po být byl byla bylo od
        tak které který která co má není když jen už jeho její jejich nebo podle při může mezi
        také více velmi já ty on ona my vy oni můj tvůj náš kde proč tento tato toto u ze k""",
    "ru": """
        и в не на что с по как это он она они мы вы я ты к но за от из у о же для так то все его
        её ее их был была было были быть есть бы только или если при мне меня который которые
        которая также когда может уже чтобы до ещё нет где очень этот эта эти этого со во если
        наш ваш мой вас нас более через""",
    "uk": """
        і в не на що з як це він вона вони ми ви я ти до але за від із у о ж для так то все його
        її їх був була було були бути є б та також або якщо при мені мене який які яка коли може
        вже щоб ще немає де дуже цей ця ці цього зі й наш ваш мій вас нас більше через про під
        над""",
    "bg": """
        и в не на че с по как това той тя те ние вие аз ти към но за от из у о да се е са до във
        със съм си бил била било били бъде има няма може или ако при мен ми му им който които
        която което също когато вече още къде много този тази тези това ще ли го ги я ни ви само
        след между през както защото така един една""",
    "ar": """
        في من على إلى أن هذا هذه التي الذي عن مع لا ما كان كانت هو هي هم أو ثم قد لم لن إن كل
        بعد قبل بين عند كما أي ذلك تلك حيث منذ حتى غير لكن يكون تكون نحن أنا أنت به بها له لها
        لهم فيه فيها هناك وقد ولا وهو وهي يمكن و يا ليس خلال""",
    "fa": """
        و در به از که را این است با برای آن یک می تا بر هم خود ما من تو شما او آنها ها های کرد
        شد شده بود نیز اما یا هر اگر باید نمی دارد دارند کند کنید کنند شود باشد هستند بین پس چه
        بسیار همه چون هیچ دیگر روی ای ام اند ی توانید تواند بودن کردن""",
    "ur": """
        کے میں کی ہے اور سے کا کو نے پر ہیں اس یہ ایک کہ بھی تھا تھی تھے وہ جو ہو تو کر لیے ان
        آپ ہم نہیں کیا گیا ساتھ بعد گی گا گے ہوئے ہوا ہوتا ہوتی ہوتے جس اپنے اپنی اپنا یا اگر
        لیکن مگر کوئی کچھ بہت جب تک میرے میری ہمارے کریں سکتے سکتا سکتی رہے رہا""",
    "hi": """
        है में के की का और से को हैं पर यह एक नहीं कि भी वह ने था थी थे जो हो तो कर लिए इस उस हम
        आप ये या अगर लेकिन कुछ बहुत जब तक मेरे मेरी मेरा हमारे आपके आपकी अपने अपनी करने करते
        करना किया गया रहे रहा रही सकते सकता सकती होता होती होते साथ बाद ही द्वारा इसके क्या कैसे
        मैं""",
    "mr": """
        आहे आणि आहेत हे ते या ही तो ती च्या मध्ये साठी एक नाही की पण मी तुम्ही आम्ही त्या
        त्यांच्या त्याच्या तिच्या होते होता होती केले केला करा करू किंवा जर तर असे असा अशी काही
        खूप सर्व आपण आपल्या माझ्या माझे माझी तुमच्या आमच्या येथे म्हणून जे जो कसे काय का ला ने
        चा ची चे झाले असते असतात करण्यासाठी म्हणजे हा""",
    "ne": """
        छ र को मा ले हो यो गर्न गर्ने छन् पनि लागि एक भएको हुन्छ थियो थिए छैन तर वा म हामी तपाईं
        उनी यस त्यो के कि भने गरेको गरी हुने सबै धेरै केही मेरो हाम्रो तपाईंको आफ्नो यदि जस्तै
        भन्ने बाट लाई संग सँग हुन् गर्दै अनि नै भएका गर्छ गर्नुहोस् हुन सक्छ त्यस यी कसरी""",
}  # fmt: skip

COMMONEST = {code: frozenset(words.split()) for code, words in _WORDS.items()}

LETTERS = {
    code: frozenset(letters)
    for code, letters in {
        "de": "ß",
        "es": "ñ",
        "pl": "łńśźżąę",
        "vi": "ơưđạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
        "tr": "ğış",
        "ro": "țș",
        "cs": "ěřů",
        "ru": "ыэё",
        "uk": "іїєґ",
        "ar": "ةكىيأإ",
        "ur": "ٹڈڑںےہھ",
    }.items()
}
