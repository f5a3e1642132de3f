/* Names and keyboard access that the theme leaves out; tables and their frames are made by the theme after the page. */

function improve() {
  document.querySelectorAll(".md-search[role=dialog]:not([aria-label])").forEach(e => e.setAttribute("aria-label", "Search"))
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((e, n) => e.setAttribute("aria-label", `Code ${n + 1}`))
  document.querySelectorAll("th:empty").forEach(e => e.replaceWith(document.createElement("td")))
  document.querySelectorAll(".md-nav[aria-labelledby]").forEach(e => {  // a section with a page: its label has an icon only
    const label = document.getElementById(e.getAttribute("aria-labelledby"))
    if (label && !label.textContent.trim()) {
      e.removeAttribute("aria-labelledby")
      e.setAttribute("aria-label", label.parentElement.textContent.trim())
    }
  })
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach(e => {
    if (e.scrollWidth > e.clientWidth) {
      e.tabIndex = 0
      e.setAttribute("role", "group")
      e.setAttribute("aria-label", "Table")
    }
  })
}

new MutationObserver(improve).observe(document, { childList: true, subtree: true })
addEventListener("resize", improve)
